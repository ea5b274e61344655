"""AutoGen: one assistant, several tasks; streamed or not."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from questions import QUESTIONS, weather


async def main(mode: str) -> None:
    info = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
    client = OpenAIChatCompletionClient(
        model="scripted", base_url=os.environ["OPENAI_BASE_URL"], api_key="key", model_info=info
    )
    agent = AssistantAgent(
        "teller", client, tools=[weather], system_message="Answer briefly.", reflect_on_tool_use=True,
        model_client_stream=mode == "streamed",
    )  # fmt: skip
    for question in QUESTIONS:
        print((await agent.run(task=question)).messages[-1].content)


asyncio.run(main(sys.argv[1]))
