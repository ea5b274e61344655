"""Check a replay: the client got the recorded replies, no request was refused, and the store holds everything."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from typing_extensions import override

from tersely.dialects.errors import classify_error
from tersely.dialects.registry import DIALECTS
from tersely.domain.history.chain import canonical
from tersely.domain.messages import Dialect as DialectName
from tersely.fakellm.scripted import CHAT, WireFormat
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.fakellm.scripted.gemini import GCA, GEMINI
from tersely.fakellm.scripted.openai_responses import RESPONSES
from tersely.fakellm.strict.openai_chat import parse_body
from tersely.replay.client import ClientReply
from tersely.replay.measure import RequestParts, common
from tersely.replay.model import RecordedRequest
from tersely.strategies.prompts import ANSWER_NOW
from tersely.transcripts.conversations import RecordedCall, ReplayRequest
from tersely.transcripts.replies import TEXT, bits
from tersely.transcripts.wire_forms import FORMS

EXCERPT = 60
CONTEXTS = frozenset({"built", "passthrough"})
# The end of the text that `trim` adds when a turn has used up its steps.
CLOSING = ANSWER_NOW.rpartition("}")[2].encode()

_WIRES: Mapping[DialectName, WireFormat] = {
    "openai_chat": CHAT,
    "openai_responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
    "gemini_gca": GCA,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFailure:
    """A failed check.

    ``call`` counts messages of the conversation from 0, or is a recorded request's number; -1: the whole conversation.
    """

    strategy: str
    conversation: str
    call: int
    what: str
    unit: str = "message"

    @override
    def __str__(self) -> str:
        location = f", {self.unit} {self.call}" if self.call >= 0 else ""
        return f"{self.strategy}: {self.conversation}{location}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredClientMessage:
    """A message in the store as the client sees it; ``is_reply``: the model wrote it, through the proxy."""

    raw: bytes
    is_reply: bool


def check_reply(
    request: ReplayRequest, answer: ClientReply, turned: Sequence[RecordedRequest], step: RecordedCall
) -> Iterator[str]:
    """Return the errors in one call's reply, in words."""
    refused = [each for each in turned if each.status >= 400]
    if not is_mended(turned):
        for each in refused:
            yield f"the upstream refused it: {_error_message(each.refusal)}"
    if answer.message is None:
        yield f"status {answer.status}: {_error_message(answer.body)}"
        return
    if len(turned) - len(refused) != 1:
        yield f"{len(turned) - len(refused)} requests were answered by the upstream instead of one"
    context = answer.headers.get("x-tersely-context", "")
    if context not in CONTEXTS:
        yield f"the context was {context or 'missing'!r}"
    if request.is_streamed and request.asks_usage is not None and answer.has_usage != request.asks_usage:
        yield "a usage chunk that was not asked for" if answer.has_usage else "no usage chunk"
    if step.reply is not None:
        yield from compare_reply(answer.message, step.reply, step.dialect)


def check_side_call(request: ReplayRequest, turned: Sequence[RecordedRequest]) -> Iterator[str]:
    """Yield an error if a call outside of any session was not passed on unchanged."""
    if any(each.body != request.body for each in turned):
        yield "a call beside the conversation was changed on its way"


def is_mended(turned: Sequence[RecordedRequest]) -> bool:
    """Return whether a request was refused as too long and a shorter one accepted, as intended."""
    if [each.status for each in turned] != [400, 200]:
        return False
    return classify_error(400, turned[0].refusal or b"") is not None


def compare_reply(
    got: Mapping[str, Any], recorded: Mapping[str, Any], dialect: DialectName = "openai_chat"
) -> Iterator[str]:
    """Return where a reply differs from the recorded one. A stream cannot distinguish null from empty content."""
    ours, recorded_bits = bits(got, dialect), bits(recorded, dialect)
    if ours == recorded_bits:
        return
    for kind in dict.fromkeys(kind for kind, _ in (*ours, *recorded_bits)):
        got_words, wanted = ([words for each, words in side if each == kind] for side in (ours, recorded_bits))
        if len(got_words) != len(wanted) and kind != TEXT:
            yield f"{len(got_words)} {kind}s instead of {len(wanted)}"
            continue
        for number, (our, their) in enumerate(zip_longest(got_words, wanted, fillvalue="")):
            yield from _compare_text(kind if kind == TEXT else f"{kind} {number}", our, their)
    if sorted(ours) == sorted(recorded_bits):
        yield "the parts are in another order"


def _compare_text(name: str, got: object, wanted: object) -> Iterator[str]:
    ours, recorded_bits = str(got), str(wanted)
    if ours == recorded_bits:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, recorded_bits, strict=False)) if a != b),
        min(len(ours), len(recorded_bits)),
    )
    start = max(0, at - 10)
    yield (
        f"{name} differs at character {at}: {_excerpt(ours[start:])} instead of {_excerpt(recorded_bits[start:])} "
        f"({len(ours)} and {len(recorded_bits)} characters)"
    )


def check_prefix(sent: RequestParts, before: RequestParts | None, *, same_epoch: bool) -> Iterator[str]:
    """Check that within an epoch each request begins with the whole previous request, unless that was shortened.

    A closing request for an answer is written again at the end of each call that needs it.
    """
    if before is None or not same_epoch:
        return
    earlier = before.blocks
    if earlier and CLOSING in earlier[-1]:
        earlier = earlier[:-1]
    same = common(sent.blocks, earlier)
    if same < len(earlier):
        yield (
            f"the same epoch, but message {same} of the {len(earlier)} of the request before is not the same: "
            f"{_shown(earlier[same])} became " + (_shown(sent.blocks[same]) if same < len(sent.blocks) else "nothing")
        )


def is_orderly(request: ReplayRequest) -> bool:
    """Return whether a provider would have taken the client's own request."""
    parsed = parse_body(request.body)
    return isinstance(parsed, dict) and _WIRES[request.dialect].check(parsed) is None


def check_stored(
    expected: Sequence[bytes], stored: Sequence[StoredClientMessage], dialect: DialectName = "openai_chat"
) -> Iterator[tuple[int, str]]:
    """Return where the store lacks messages of a conversation, verbatim and in order.

    The client's messages must be stored byte for byte. A reply is stored in the host's form and must have the recorded
    content.
    """
    if len(stored) != len(expected):
        yield -1, f"{len(stored)} messages are stored instead of {len(expected)}"
    for index, (wanted, held) in enumerate(zip(expected, stored, strict=False)):
        if held.is_reply:
            for difference in compare_reply(as_reply(held.raw, dialect), as_reply(wanted, dialect), dialect):
                yield index, f"stored: {difference}"
        elif held.raw != wanted:
            yield index, f"stored as {_shown(held.raw)} instead of {_shown(wanted)}"


def check_links(
    expected: Sequence[bytes], sent: Container[bytes], stored: Sequence[StoredClientMessage], dialect: DialectName
) -> Iterator[tuple[int, str]]:
    """Check the links of a client that rewrites its messages: the stored bytes must be ones that it once sent.

    ``sent`` is everything that it ever sent. Instructions and injected messages are no part of a history.
    """
    read = DIALECTS[dialect].read_message
    wanted = [(identity, raw) for raw in expected if (identity := canonical(read(raw)))]
    held = [(identity, each) for each in stored if (identity := canonical(read(each.raw)))]
    if [identity for identity, _ in wanted] != [identity for identity, _ in held]:
        yield -1, f"{len(held)} messages are stored, which are not the {len(wanted)} of the client's last request"
    for index, (_, each) in enumerate(held):
        if not each.is_reply and each.raw not in sent:
            yield index, f"stored as {_shown(each.raw)}, which the client never sent"


def as_reply(raw: bytes, dialect: DialectName) -> Mapping[str, Any]:
    """Return a message of a history as a reply is written in its dialect."""
    message: Mapping[str, Any] = FORMS[dialect].reply(raw)
    return message


def _shown(raw: bytes) -> str:
    return _excerpt(raw.decode("utf-8", "replace"))


def _error_message(body: bytes | None) -> str:
    try:
        return _excerpt(str(json.loads(body or b"")["error"]["message"]), 200)
    except (ValueError, KeyError, TypeError):
        return _excerpt((body or b"").decode("utf-8", "replace"), 200)


def _excerpt(text: str, limit: int = EXCERPT) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
