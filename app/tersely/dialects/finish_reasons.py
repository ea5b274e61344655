"""The finish reasons of all dialects and hosts, in lower case, by what they say of a reply's calls."""

from __future__ import annotations

ENDED = frozenset({"", "stop", "end_turn", "stop_sequence", "tool_calls", "tool_use", "function_call", "completed"})
"""The model ended its reply: its calls are what it meant to write."""

CUT_OFF = frozenset(
    {
        # The reply was too long.
        "length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded",
        # The host refused or took back what the model wrote.
        "content_filter", "refusal", "safety", "sensitive", "recitation", "language", "blocklist",
        "prohibited_content", "spii", "model_armor", "image_safety", "image_prohibited_content", "image_recitation",
        "image_other", "no_image", "other",
        # The host could not read it.
        "malformed_function_call", "malformed_response", "unexpected_tool_call", "too_many_tool_calls",
        "missing_thought_signature",
        # The host failed or has not finished.
        "incomplete", "insufficient_system_resource", "error", "network_error", "failed", "abort", "aborted",
        "cancelled", "queued", "in_progress",
    }
)  # fmt: skip
"""The reply did not come to its end: its calls may be incomplete, and the client must see the reason."""
