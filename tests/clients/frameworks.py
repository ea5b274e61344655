"""Frameworks and small tools, run by scripts of a few lines."""

from __future__ import annotations

from tests.clients.program import FILLER, Program, Step

KEYS = {
    "OPENAI_BASE_URL": "$URL/v1",
    "OPENAI_API_KEY": "key",
    "ANTHROPIC_BASE_URL": "$URL",
    "ANTHROPIC_API_KEY": "key",
}
ANSWERS = ("amber-1", "The tool answered: Paris is sunny", "cobalt-3", "drab-4", "ebony-5", "Oslo is sunny", "gold-7")


def _modes(
    name: str, pip: tuple[str, ...], modes: tuple[str, ...], *, turns: tuple[int, ...] = (7,), **env: str
) -> tuple[Program, ...]:
    script = f"run_{name.replace('-', '_')}.py"
    return tuple(
        Program(
            name=f"{name}-{mode}",
            of=name,
            pip=pip,
            env=KEYS | env,
            steps=(Step(command=f"python $SCRIPTS/{script} {mode}", expects=ANSWERS),),
            # A summary in front of a reply whose question it covers is a turn of its own.
            turns=(8,) if (name, mode) == ("langchain", "summary") else turns,
            # What summarises by itself need not outgrow the window.
            has_cuts=mode != "summary",
            loose="it sends only what is new" if mode == "previous" else "",
        )
        for mode in modes
    )


_AGENTS = ("openai-agents==0.24.0",)
OPENAI_AGENTS = _modes("openai-agents", _AGENTS, ("responses", "chat", "streamed", "previous"))
LANGCHAIN = _modes(
    "langchain",
    ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    ("chat", "streamed", "responses", "anthropic", "summary"),
)
PYDANTIC_AI = _modes(
    "pydantic-ai",
    ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    ("openai-chat", "openai-responses", "anthropic", "streamed"),
)
LLAMAINDEX = _modes(
    "llamaindex",
    ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3"),
    ("chat", "responses", "summary"),
)
AUTOGEN = _modes("autogen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), ("whole", "streamed"))

LLM = Program(
    name="llm",
    pip=("llm==0.36",),
    env={"OPENAI_API_KEY": "key"},
    files={
        "io.datasette.llm/extra-openai-models.yaml": """- model_id: scripted
  model_name: scripted
  api_base: $URL/v1
  supports_tools: true
""",
        "tools.py": '''def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"{city} is sunny"
''',
    },
    steps=(
        Step(
            command='LLM_USER_PATH=$HOME/io.datasette.llm llm -m scripted "$ASK"', ask=f"Say hello to amber-1. {FILLER}"
        ),
        *(
            Step(
                command='LLM_USER_PATH=$HOME/io.datasette.llm llm -c --functions $HOME/tools.py "$ASK"',
                ask=ask,
                expects=(words,),
            )
            for ask, words in (
                ('call weather {"city": "Paris"}', "Paris is sunny"),
                (f"And cobalt-3? {FILLER}", "cobalt-3"),
                (f"And drab-4? {FILLER}", "drab-4"),
                (f"And ebony-5? {FILLER}", "ebony-5"),
                ("And fawn-6?", "fawn-6"),
            )
        ),
        Step(
            command='LLM_USER_PATH=$HOME/io.datasette.llm llm -c --no-stream "$ASK"',
            ask="And gold-7?",
            expects=("gold-7",),
        ),
    ),
    turns=(7,),
)

SMOLAGENTS = Program(
    name="smolagents",
    pip=("smolagents[openai]==1.26.0",),
    env=KEYS,
    steps=(Step(command="python $SCRIPTS/run_smolagents.py", expects=("answer 0",)),),
    turns=(9,),
    has_cuts=False,
)

CREWAI = Program(
    name="crewai",
    pip=("crewai==1.15.30",),
    env=KEYS | {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"},
    steps=(Step(command="python $SCRIPTS/run_crewai.py", expects=("amber-1", "Paris is sunny", "cobalt-3")),),
    turns=(1, 1, 1),
    has_cuts=False,
)

MINI = Program(
    name="mini-swe-agent",
    pip=("mini-swe-agent==2.4.6", "mcp"),
    env={
        "OPENAI_API_BASE": "$URL/v1",
        "OPENAI_API_KEY": "key",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    steps=(
        Step(
            command='mini -m openai/scripted --yolo --exit-immediately -o $HOME/run.json -t "$ASK"',
            ask='Greet.\ncall bash {"command": "printf bronze-; expr 1 + 1"}',
            expects=("bronze-2",),
        ),
    ),
    # It never sends replies without a call again, and complains of them to the model.
    turns=(3,),
    has_cuts=False,
)

VERCEL = tuple(
    Program(
        name=f"vercel-ai-sdk-{mode}",
        of="vercel-ai-sdk",
        npm=(
            "ai@7.0.173",
            "@ai-sdk/openai-compatible@3.0.92",
            "@ai-sdk/openai@4.0.118",
            "@ai-sdk/anthropic@4.0.105",
            "zod",
        ),
        node="22",
        steps=(Step(command=f"node $SCRIPTS/run_vercel.mjs {mode}", expects=ANSWERS),),
        turns=(7,),
        loose="it refers to replies instead of sending them" if mode == "responses" else "",
    )
    for mode in ("chat", "responses", "anthropic")
)

FRAMEWORKS = (
    *OPENAI_AGENTS,
    *LANGCHAIN,
    *PYDANTIC_AI,
    LLM,
    *LLAMAINDEX,
    SMOLAGENTS,
    *AUTOGEN,
    CREWAI,
    MINI,
    *VERCEL,
)
