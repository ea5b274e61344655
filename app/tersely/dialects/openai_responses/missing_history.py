"""Histories that the provider keeps for those who name them: what it says when it has none of that name."""

from __future__ import annotations

import re

# Providers, their look-alikes and what stands in front of them differ in status, code and words; most name the member.
_REFUSALS = frozenset({400, 403, 404, 405, 410, 422, 501})
_HISTORY = r"previous[ _]response|response(?:[ _]id| with id)|\bconversation|\bresp_"
_MISSING = (
    r"not[ _]found|n[o']t exist|no such|unknown|unrecogni[sz]ed|unsupported|not (?:been )?(?:support|implement|enabl)"
    r"|not (?:stored|available|permitted|allowed|persisted)|cannot be used|disabled|expired|data retention"
)
_LACKS = re.compile(rf"(?:{_HISTORY}).*(?:{_MISSING})|(?:{_MISSING}).*(?:{_HISTORY})", re.IGNORECASE | re.DOTALL)
_DOES_NOT = re.compile(r"does not support '?(?:previous_response_id|conversation)", re.IGNORECASE)
_LOOKED_AT = 16 * 1024


def lacks_history(status: int, body: bytes) -> bool:
    """Return whether an error says so: as a response, or (``status`` 200) at the beginning of a stream.

    Anything else that is wrong with a request, a conversation that is busy among it, is something else.
    """
    text = body[:_LOOKED_AT].decode(errors="replace")
    if status == 200:
        return '"error"' in text and "not_found" in text and bool(_LACKS.search(text))
    if status not in _REFUSALS:
        return False
    if _LACKS.search(text) or _DOES_NOT.search(text):
        return True
    return status == 404 and "not_found" in text and "model" not in text
