"""The members of messages and blocks that providers describe, or that real clients were seen to send.

One table for two users: the scripted model refuses every other member where a real provider does, and Tersely counts
every other member that a client sends (it passes all the same), so that a release of a client that sends something new
is noticed before a provider is.
"""

from __future__ import annotations

from collections.abc import Mapping

# Seen beside the described ones: the client and the version that sent it first.
SEEN_FIELDS: Mapping[tuple[str, str, str], str] = {
    ("anthropic", "message:system", "output_config"): "Claude Code 2.1.330",
    ("openai_chat", "message", "__copilotMessageSource"): "Copilot CLI 1.0.102",
    ("openai_chat", "message", "provider_specific_fields"): "LiteLLM (aider 0.86.2)",
    ("openai_responses", "message", "internal_chat_message_metadata_passthrough"): "Codex 0.169.0",
    ("openai_responses", "reasoning", "internal_chat_message_metadata_passthrough"): "Codex 0.169.0",
}

_CHAT_MESSAGE = (
    "role content name tool_calls tool_call_id function_call refusal audio annotations reasoning reasoning_content "
    "reasoning_details prefix cache_control extra_content"
)
_RESULT = "type tool_use_id content is_error cache_control"
_DESCRIBED: Mapping[str, Mapping[str, str]] = {
    "openai_chat": {
        "message": _CHAT_MESSAGE,
        "tool_call": "id type index function custom extra_content",
    },
    "anthropic": {
        "system": "system",
        "message:user": "role content",
        "message:assistant": "role content",
        "message:system": "role content",
        "text": "type text cache_control citations",
        "thinking": "type thinking signature",
        "redacted_thinking": "type data",
        "image": "type source cache_control",
        "tool_use": "type id name input cache_control caller",
        "tool_result": _RESULT,
    },
    "gemini": {
        "systemInstruction": "systemInstruction system_instruction",
        "content": "role parts",
        "part": (
            "text inlineData fileData functionCall functionResponse executableCode codeExecutionResult toolCall "
            "inline_data file_data function_call function_response thought thoughtSignature thought_signature "
            "videoMetadata mediaResolution"
        ),
    },
    "openai_responses": {
        "instructions": "instructions",
        "output": "output",
        "message": "type id role content status phase created_by",
        "reasoning": "type id summary content encrypted_content status",
        "function_call": "type id call_id name arguments status namespace created_by",
        "function_call_output": "type id call_id output status created_by",
    },
}


def _fields() -> dict[tuple[str, str], frozenset[str]]:
    found: dict[tuple[str, str], frozenset[str]] = {}
    for dialect, blocks in _DESCRIBED.items():
        found |= {(dialect, block): frozenset(names.split()) for block, names in blocks.items()}
    for provider, block, name in SEEN_FIELDS:
        found[provider, block] |= {name}
    return found


FIELDS = _fields()
"""(dialect, block) -> its known members. A block that is not here is not looked at."""


def unknown_members(dialect: str, block: str, members: Mapping[str, object]) -> list[str]:
    """Return the names of the members of a known block that are not in the table, in alphabetical order."""
    known = FIELDS.get((dialect, block))
    return [] if known is None else sorted(members.keys() - known)
