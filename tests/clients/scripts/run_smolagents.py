"""smolagents: an agent that calls tools, whose history goes on."""

import os

from questions import QUESTIONS
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
    """
    return f"{city} is sunny"


model = OpenAIServerModel(model_id="scripted", api_base=os.environ["OPENAI_BASE_URL"], api_key="key")
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=1)
for number, question in enumerate(QUESTIONS):
    task = question if "weather" in question else f'call final_answer {{"answer": "answer {number}"}}'
    print(agent.run(task, reset=number == 0))
