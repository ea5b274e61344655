"""LlamaIndex: `chat`, `responses` or `summary` (its own summaries)."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatSummaryMemoryBuffer, Memory
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from questions import QUESTIONS, weather


async def main(mode: str) -> None:
    base = os.environ["OPENAI_BASE_URL"]
    if mode == "responses":
        llm = OpenAIResponses(model="gpt-4o", api_base=base, api_key="key")
    else:
        llm = OpenAILike(
            model="scripted", api_base=base, api_key="key", is_chat_model=True, is_function_calling_model=True
        )
    if mode == "summary":
        memory = ChatSummaryMemoryBuffer.from_defaults(llm=llm, token_limit=600)
    else:
        memory = Memory.from_defaults(session_id="one", token_limit=40_000)
    agent = FunctionAgent(tools=[weather], llm=llm, system_prompt="Answer briefly.")
    for question in QUESTIONS:
        print(await agent.run(question, memory=memory))


asyncio.run(main(sys.argv[1]))
