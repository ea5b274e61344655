"""openai-agents: `responses`, `chat`, `streamed` or `previous` (the host keeps the history)."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from questions import QUESTIONS, weather


async def main(mode: str) -> None:
    set_tracing_disabled(disabled=True)
    model = OpenAIChatCompletionsModel(model="scripted", openai_client=AsyncOpenAI()) if mode == "chat" else "scripted"
    agent = Agent(name="teller", instructions="Answer briefly.", model=model, tools=[function_tool(weather)])
    session = None if mode == "previous" else SQLiteSession("one")
    last = None
    for question in QUESTIONS:
        if mode == "streamed":
            result = Runner.run_streamed(agent, question, session=session)
            async for _ in result.stream_events():
                pass
        elif mode == "previous":
            result = await Runner.run(agent, question, previous_response_id=last)
            last = result.last_response_id
        else:
            result = await Runner.run(agent, question, session=session)
        print(result.final_output)


asyncio.run(main(sys.argv[1]))
