"""Agents that are programs of their own."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clients.program import FILLER, Program, Step
from tests.clients.running import PROXIES

GREET = '{"command": "printf bronze-; expr 1 + 1"}'


def talk(
    first: str, again: str, call: str, *, streamed: str = "", more: Sequence[Step] = (), compact: str = ""
) -> tuple[Step, ...]:
    """A conversation of a tool call and enough words to outgrow a small window; ``again`` resumes it in a new process.

    ``call`` is a tool's name and arguments by which the words ``bronze-2`` come out; ``compact`` comes before the last
    question, ``more`` before that.
    """
    steps = [
        Step(command=first, ask=f"Say hello to amber-1. {FILLER}", expects=("I was sent",)),
        Step(command=again, ask=f"call {call}", expects=("The tool answered", "bronze-2")),
        Step(command=again, ask=f"And cobalt-3? {FILLER}", expects=("I was sent", "cobalt-3")),
        Step(command=streamed or again, ask=f"And drab-4? {FILLER}", expects=("drab-4",)),
        Step(command=again, ask=f"And ebony-5? {FILLER}", expects=("I was sent", "ebony-5")),
        Step(command=again, ask=f"And fawn-6? {FILLER}", expects=("I was sent", "fawn-6")),
        *more,
    ]
    if compact:
        steps.append(Step(command=compact))
    return (*steps, Step(command=again, ask="And gold-7?", expects=("I was sent",)))


CLAUDE = Program(
    name="claude-code",
    npm=("@anthropic-ai/claude-code@2.1.330",),
    setup="node node_modules/@anthropic-ai/claude-code/install.cjs",
    env={
        "ANTHROPIC_BASE_URL": "$URL",
        "ANTHROPIC_API_KEY": "key",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    },
    steps=talk(
        'claude -p "$ASK"',
        'claude -p --continue --allowedTools=Bash,Agent -- "$ASK"',
        f"Bash {GREET}",
        streamed='claude -p --continue --output-format stream-json --verbose "$ASK"',
        more=(
            Step(
                command='claude -p --continue --allowedTools=Agent -- "$ASK"',
                ask='call Agent {"description": "a", "subagent_type": "general-purpose", "prompt": "What of ivy-8?"}',
                # It runs in the background, and its end is told in a reminder.
                expects=("I was sent",),
            ),
        ),
        compact='claude -p --continue "/compact"',
    ),
    # Behind its summary it keeps its last reply, so that both are of one turn.
    turns=(8,),
    children=(1,),
)

_CODEX = "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"


def _codex(
    name: str, config: str, *first: Step, compact: str = "", asides: frozenset[tuple[str, int]] = frozenset()
) -> Program:
    return Program(
        name=name,
        of="codex",
        npm=("@openai/codex@0.169.0",),
        env={"OPENAI_API_KEY": "key"},
        files={".codex/config.toml": config},
        steps=(
            *first,
            *talk(
                f'{_CODEX} "$ASK"',
                f'{_CODEX} resume --last "$ASK"',
                'exec_command {"cmd": "printf bronze-; expr 1 + 1"}',
                streamed=f'{_CODEX} resume --last --json "$ASK"',
            ),
            Step(
                command=f'{_CODEX} resume --last {compact} "$ASK"',
                ask="And hazel-8?",
                expects=("I was sent", "hazel-8"),
            ),
            Step(command=f'{_CODEX} resume --last "$ASK"', ask="And ivy-9?", expects=("I was sent", "ivy-9")),
        ),
        turns=(10,) if compact else (9,),
        asides=asides,
    )


CODEX = _codex(
    "codex",
    """
model = "scripted"
model_provider = "tersely"
model_providers.tersely = { name = "tersely", base_url = "$URL/v1", env_key = "OPENAI_API_KEY", wire_api = "responses" }
analytics.enabled = false
""",
    compact="-c model_auto_compact_token_limit=1000",
)
# Its own provider tries a websocket first, and leaves compaction to its host, which a scripted one cannot do.
CODEX_BUILT_IN = _codex(
    "codex-built-in",
    """
model = "scripted"
openai_base_url = "$URL/v1"
analytics.enabled = false
""",
    Step(command="printenv OPENAI_API_KEY | codex login --with-api-key"),
    asides=frozenset({("/v1/responses", 426)}),
)

_GEMINI = "gemini --skip-trust -y --resume latest"
GEMINI = Program(
    name="gemini-cli",
    npm=("@google/gemini-cli@0.61.0",),
    env={"GOOGLE_GEMINI_BASE_URL": "$URL", "GEMINI_API_KEY": "key", "GEMINI_TELEMETRY_ENABLED": "false"},
    files={
        ".gemini/settings.json": """{"security": {"auth": {"selectedType": "gemini-api-key"}},
"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false, "disableUpdateNag": true}}"""
    },
    steps=talk(
        'gemini --skip-trust -p "$ASK"',
        f'{_GEMINI} -p "$ASK"',
        f"run_shell_command {GREET}",
        streamed=f'{_GEMINI} -o stream-json -p "$ASK"',
        compact=f'{_GEMINI} -p "/compress"',
    ),
    # Without a terminal it asks the model "/compress" too.
    turns=(8,),
)

OPENCODE_SETTINGS = """{"provider": {"tersely": {"npm": "@ai-sdk/openai-compatible",
"options": {"baseURL": "$URL/v1", "apiKey": "key"},
"models": {"scripted": {"limit": {"context": %d, "output": 4000}}}}},
"compaction": {"tail_turns": 1, "preserve_recent_tokens": 4000},
"model": "tersely/scripted", "share": "disabled", "autoupdate": false, "permission": "allow"}"""

OPENCODE_AGAIN = 'opencode run --continue <<< "$ASK"'


def _opencode(
    name: str, window: int, *, turns: tuple[int, ...], more: tuple[Step, ...] = (), epochs: tuple[str, ...]
) -> Program:
    return Program(
        name=name,
        of="opencode",
        npm=("opencode-ai@1.18.33",),
        setup="node node_modules/opencode-ai/postinstall.mjs",
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files={".config/opencode/opencode.json": OPENCODE_SETTINGS % window},
        steps=talk(
            'opencode run <<< "$ASK"',
            OPENCODE_AGAIN,
            'bash {"command": "printf bronze-; expr 1 + 1", "description": "greet"}',
            streamed='opencode run --continue --format json <<< "$ASK"',
            more=(
                *more,
                Step(
                    command=OPENCODE_AGAIN,
                    ask='call task {"description": "look", "subagent_type": "general", "prompt": "Tell me of ivy-8."}',
                    expects=("The tool answered", "ivy-8"),
                ),
            ),
        ),
        turns=turns,
        children=(1,),
        epochs=epochs,
    )


_AIDER = (
    "aider --model openai/scripted --yes-always --no-pretty --no-check-update --no-show-release-notes --no-analytics "
    "--no-show-model-warnings --no-gitignore --no-detect-urls"
)
AIDER = Program(
    name="aider",
    pip=("aider-chat==0.86.2",),
    env={"OPENAI_API_BASE": "$URL/v1", "OPENAI_API_KEY": "key", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    steps=(
        Step(
            command=f'printf "%s\\n" "$ASK" "And cobalt-3? $FILLER" "And drab-4? $FILLER" "And ebony-5? $FILLER" '
            f'"And fawn-6? $FILLER" "And gold-7?" | {_AIDER}',
            ask=f"Say hello to amber-1. {FILLER}",
            expects=("amber-1", "gold-7"),
        ),
        Step(command=f'{_AIDER} --restore-chat-history --message "$ASK"', ask="And hazel-8?", expects=("hazel-8",)),
        Step(command=f"echo x > new.txt; git add new.txt; {_AIDER} --commit"),
        Step(
            command=f'printf "%s\\n" "And ivy-9? $FILLER" "And jade-1? $FILLER" "And khaki-2?" | {_AIDER} '
            "--restore-chat-history --max-chat-history-tokens 500",
            expects=("ivy-9", "khaki-2"),
        ),
    ),
    # With the examples and file lists that stand before the history; restored, it is a conversation of its own.
    turns=(10, 15),
    moved=6,
    loose="its history comes back in other words",
)

PI_MODELS = """{"providers": {"tersely": {"baseUrl": "%s", "apiKey": "key", "api": "%s",
"models": [{"id": "scripted", "contextWindow": 200000}]}}}"""


def _pi(name: str, api: str, base: str) -> Program:
    pi = "pi --offline --provider tersely --model scripted"
    return Program(
        name=name,
        of="pi",
        npm=("@earendil-works/pi-coding-agent@0.87.1",),
        node="22",
        env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
        files={
            ".pi/agent/models.json": PI_MODELS % (base, api),
            ".pi/agent/settings.json": '{"compaction": {"reserveTokens": 1000, "keepRecentTokens": 300}}',
        },
        steps=(
            *talk(
                f'{pi} -p "$ASK"', f'{pi} -p --continue "$ASK"', f"bash {GREET}",
                streamed=f'{pi} -p --mode json --continue "$ASK"',
            ),
            Step(
                command='(echo \'{"type": "compact"}\'; sleep 8; '
                'echo \'{"type": "prompt", "message": "And hazel-8?"}\'; sleep 8) | ' + f"{pi} --continue --mode rpc",
                expects=("I was sent", "hazel-8"),
            ),
        ),
        turns=(9,),
    )  # fmt: skip


def _copilot(name: str, base: str, *, turns: int = 8, **env: str) -> Program:
    again = 'copilot --allow-all-tools --continue -p "$ASK"'
    return Program(
        name=name,
        of="copilot-cli",
        npm=("@github/copilot@1.0.102",),
        env={
            "COPILOT_PROVIDER_BASE_URL": base,
            "COPILOT_PROVIDER_API_KEY": "key",
            "COPILOT_MODEL": "scripted",
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
            **env,
        },
        steps=talk(
            'copilot --allow-all-tools -p "$ASK"',
            again,
            'bash {"command": "printf bronze-; expr 1 + 1", "description": "greet"}',
            streamed='copilot --allow-all-tools --output-format json --continue -p "$ASK"',
            compact='copilot --allow-all-tools --continue -p "/compact"',
        ),
        turns=(turns,),
    )


_QWEN = "qwen --auth-type openai --yolo --continue"
QWEN = Program(
    name="qwen-code",
    npm=("@qwen-code/qwen-code@0.24.4",),
    node="22",
    # It takes a proxy for loopback addresses too.
    env={
        "OPENAI_BASE_URL": "$URL/v1",
        "OPENAI_API_KEY": "key",
        "OPENAI_MODEL": "scripted",
        **dict.fromkeys(PROXIES, ""),
    },
    files={
        ".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false}}'
    },
    steps=talk(
        'qwen --auth-type openai -p "$ASK"',
        f'{_QWEN} -p "$ASK"',
        f"run_shell_command {GREET}",
        streamed=f'{_QWEN} -o stream-json -p "$ASK"',
        compact=f'{_QWEN} -p "/compress"',
    ),
    # It drops what the scripted model says instead of a snapshot, so that nothing ties the rest to the session.
    turns=(2, 6),
)

CLINE = Program(
    name="cline",
    npm=("cline@3.0.65",),
    steps=(
        Step(command="cline auth -p openai -k key -m scripted -b $URL/v1"),
        Step(command='cline --json "$ASK"', ask=f"Say hello to amber-1. {FILLER}", expects=("I was sent",)),
        # Only on a terminal does it resume.
        Step(
            command="cline -i --id $(ls $HOME/.cline/data/sessions | head -1)",
            keys=(
                'call run_commands {"commands": ["printf bronze-; expr 1 + 1"]}',
                f"And cobalt-3? {FILLER}",
                f"And drab-4? {FILLER}",
                f"And ebony-5? {FILLER}",
                "And fawn-6?",
            ),
            expects=("bronze-2", "I was sent"),
        ),
    ),
    turns=(6,),
)

_CONTINUE = "cn --config $HOME/config.yaml"
CONTINUE = Program(
    name="continue-cli",
    npm=("@continuedev/cli@1.5.47",),
    env={"CONTINUE_TELEMETRY_ENABLED": "0"},
    files={
        "config.yaml": """name: try
version: 1.0.0
schema: v1
models:
  - {name: tersely, provider: openai, model: scripted, apiBase: "$URL/v1", apiKey: key, roles: [chat]}
"""
    },
    steps=talk(
        f'{_CONTINUE} -p "$ASK"',
        f'{_CONTINUE} --auto --resume -p "$ASK"',
        f"Bash {GREET}",
        compact=f'{_CONTINUE} --resume -p "/compact"',
    ),
    # What it compacts without a terminal is not what it resumes.
    turns=(7,),
)

AGENTS = (
    CLAUDE,
    CODEX,
    CODEX_BUILT_IN,
    GEMINI,
    _opencode("opencode", 200_000, turns=(8,), epochs=("auto", "small")),
    # It compacts once the host has counted 11,700 tokens, of which some 8,000 are instructions and tools. A long
    # question takes the count from 1,000 tokens below that to 1,000 above, so that no other change decides when it
    # compacts. The compaction is two turns more: the question for the summary, and the one to go on. Where Tersely
    # cuts, it need not.
    _opencode(
        "opencode-compacting",
        15_700,
        turns=(11,),
        more=(Step(command=OPENCODE_AGAIN, ask=f"And jade-8? {FILLER * 6}", expects=("I was sent", "jade-8")),),
        epochs=("auto",),
    ),
    AIDER,
    _pi("pi", "openai-completions", "$URL/v1"),
    _pi("pi-anthropic", "anthropic-messages", "$URL"),
    _pi("pi-responses", "openai-responses", "$URL/v1"),
    _copilot("copilot-cli", "$URL/v1"),
    _copilot("copilot-cli-responses", "$URL/v1", COPILOT_PROVIDER_WIRE_API="responses"),
    # Its summary and the next question are one message; the summary has the words that ask for a call.
    _copilot("copilot-cli-anthropic", "$URL", turns=7, COPILOT_PROVIDER_TYPE="anthropic"),
    QWEN,
    CLINE,
    CONTINUE,
)
