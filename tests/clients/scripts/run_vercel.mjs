// Vercel AI SDK: `chat`, `responses` or `anthropic`; every other question is streamed.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const find = createRequire(process.env.LIB + "/package.json");
const load = (name) => import(pathToFileURL(find.resolve(name)).href);
const { generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const options = { baseURL: process.env.URL + "/v1", apiKey: "key" };
const model = {
  chat: () => createOpenAICompatible({ name: "tersely", ...options })("scripted"),
  responses: () => createOpenAI(options).responses("scripted"),
  anthropic: () => createAnthropic(options)("scripted"),
}[process.argv[2]]();
const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `${city} is sunny`,
});
const filler = process.env.FILLER;
const questions = [
  `Say hello to amber-1. ${filler}`,
  'call weather {"city": "Paris"}',
  `And cobalt-3? ${filler}`,
  `And drab-4? ${filler}`,
  `And ebony-5? ${filler}`,
  'call weather {"city": "Oslo"}',
  "And gold-7?",
];
let messages = [];
for (const [number, content] of questions.entries()) {
  messages.push({ role: "user", content });
  const call = { model, messages, system: "Answer briefly.", tools: { weather }, stopWhen: stepCountIs(5) };
  const result = number % 2 ? await generateText(call) : streamText(call);
  console.log(await result.text);
  messages = messages.concat((await result.response).messages);
}
