"""Pydantic AI: `openai-chat`, `openai-responses`, `anthropic` or `streamed`."""

import asyncio
import sys

from pydantic_ai import Agent
from questions import QUESTIONS, weather


async def main(mode: str) -> None:
    provider = "openai-chat" if mode == "streamed" else mode
    agent = Agent(f"{provider}:scripted", instructions="Answer briefly.", tools=[weather])
    history = []
    for question in QUESTIONS:
        if mode == "streamed":
            async with agent.run_stream(question, message_history=history) as result:
                answer = await result.get_output()
        else:
            result = await agent.run(question, message_history=history)
            answer = result.output
        history = result.all_messages()
        print(answer)


asyncio.run(main(sys.argv[1]))
