"""The model host of a replay: it answers each call with the recorded reply and reports the usage of a prompt cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tersely.domain.messages import Dialect as DialectName
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.fakellm.scripted.gemini import GCA, GEMINI
from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.openai_responses import RESPONSES
from tersely.fakellm.scripted.replies import ScriptedExchange, ScriptedReply, WireFormat, default_reply, digest
from tersely.fakellm.scripted.server import ScriptedModel
from tersely.fakellm.strict.openai_chat import parse_body
from tersely.service.common.offload import run_in_thread_if_large
from tersely.transcripts.conversations import RecordedCall

WIRES: Mapping[DialectName, WireFormat] = {
    "openai_chat": CHAT,
    "openai_responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
    "gemini_gca": GCA,
}


class RecordedHost:
    """A model host with the replies of a transcript. Tokens are bytes / 4. The cached part of a request is its
    longest beginning that an earlier request has had since the cache was last cold.
    """

    def __init__(self, model: str) -> None:
        self._name = model
        self._model = ScriptedModel(is_strict=False, keep=1)
        self._step: RecordedCall | None = None
        self._number = 0

    def expect(self, step: RecordedCall, *, is_cold: bool = False) -> None:
        """Set the next call. ``is_cold``: the pause before it was longer than the lifetime of the cache."""
        self._step = step
        if is_cold:
            self._model = ScriptedModel(is_strict=False, keep=1)

    async def respond(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the recorded reply to a request."""
        assert self._step is not None
        self._number += 1
        return await run_in_thread_if_large(len(body), self._respond, self._step, body)

    def _respond(self, step: RecordedCall, body: bytes) -> tuple[int, bytes]:
        wire = WIRES[step.dialect]
        parsed = parse_body(body)
        request: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
        if step.reply is None:
            message: Mapping[str, Any] = default_reply(wire.read_request(request), self._number)
        else:
            message = {key: value for key, value in step.reply.items() if key != "role"}
        reply = ScriptedReply(message=message)
        exchange = ScriptedExchange(
            request=request,
            reply=reply,
            counted=self._model.measure(request, reply, wire),
            id=f"{digest(body)}{self._number:04x}",
            model=self._name,
        )
        return reply.status, wire.whole(exchange)
