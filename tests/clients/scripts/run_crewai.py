"""CrewAI: a crew of one, a task per question; every task is a conversation of its own."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from questions import QUESTIONS


@tool("weather")
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city} is sunny"


llm = LLM(model="openai/scripted", base_url=os.environ["OPENAI_BASE_URL"], api_key="key")
agent = Agent(role="teller", goal="tell", backstory="You answer briefly.", llm=llm, tools=[weather])
tasks = [
    Task(description=f"Answer.\n{question}", expected_output="an answer", agent=agent) for question in QUESTIONS[:3]
]
print(Crew(agents=[agent], tasks=tasks).kickoff().raw)
for task in tasks:
    print(task.output.raw)
