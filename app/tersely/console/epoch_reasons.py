"""Say in plain words why an epoch began."""

from __future__ import annotations

from collections.abc import Mapping

from tersely.strategies.epochs.policies import Reason

EPOCH_REASONS: Mapping[Reason, str] = {
    "first": "the first context of the session",
    "high_watermark": "the context had grown past its high watermark",
    "window": "the context no longer fitted the model's window",
    "overflow": "the model refused the context as too long",
    "edit": "messages that had been sent were changed or hidden",
    "config": "strategy or epoch policy changed",
    "stride": "the policy's number of turns had passed",
    "cold_cache": "the cache had expired, so that a shorter context cost nothing extra",
    "break_even": "a shorter context saves more than it costs to read it anew",
    "every_request": "the policy writes the context anew at every call",
    "turns": "there were more turns than the strategy keeps",
    "messages": "there were more messages than the strategy keeps",
    "resume": "the session went on after a long pause",
    "compact": "the context was compacted",
    "clear": "the context was cleared",
    "instructions": "Tersely's instructions and tools were added",
}


def explain_epoch(reason: str) -> str:
    """Return the sentence for an epoch's reason; an unknown reason as it is."""
    return next((text for known, text in EPOCH_REASONS.items() if known == reason), reason.replace("_", " "))
