"""LangChain: `chat`, `streamed`, `responses`, `anthropic` or `summary` (its own summaries)."""

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_anthropic import ChatAnthropic
from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from questions import QUESTIONS, weather


def main(mode: str) -> None:
    middleware = []
    if mode == "anthropic":
        model = ChatAnthropic(model_name="scripted", max_tokens=900)
        middleware = [AnthropicPromptCachingMiddleware()]
    else:
        model = ChatOpenAI(model="scripted", streaming=mode == "streamed", use_responses_api=mode == "responses")
    if mode == "summary":
        middleware = [SummarizationMiddleware(model=model, trigger=("messages", 7), keep=("messages", 2))]
    agent = create_agent(
        model, [weather], system_prompt="Answer briefly.", middleware=middleware, checkpointer=InMemorySaver()
    )
    config = {"configurable": {"thread_id": "one"}}
    for question in QUESTIONS:
        state = agent.invoke({"messages": [{"role": "user", "content": question}]}, config)
        print(state["messages"][-1].text)


main(sys.argv[1])
