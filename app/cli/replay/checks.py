"""What a replay proves: the client got what was recorded, nothing was refused, and the store holds it all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from app.cli.replay.client import Answer, Request
from app.cli.replay.measure import common
from app.cli.replay.model import Turned
from app.cli.replay.transcripts import Conversation, Said
from app.strategies.prompts import ANSWER_NOW
from app.upstream.strict import check as find_refusal

EXCERPT = 60
OVERFLOW = b'"context_length_exceeded"'
CONTEXTS = frozenset({"built", "passthrough"})
# The end of what `trim` says when a turn has used up its steps.
CLOSING = ANSWER_NOW.rpartition("}")[2].encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that was not as it should be. ``call`` counts messages of the conversation from 0; -1: all of it."""

    strategy: str
    conversation: str
    call: int
    what: str

    @override
    def __str__(self) -> str:
        place = f", message {self.call}" if self.call >= 0 else ""
        return f"{self.strategy}: {self.conversation}{place}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A message as the store holds it for the client; ``is_reply``: it came from the model, through the proxy."""

    raw: bytes
    is_reply: bool


def check_answer(request: Request, answer: Answer, turned: Sequence[Turned], recorded: Said) -> Iterator[str]:
    """What is wrong with one call, in words."""
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
    if not answer.session:
        yield "no session: it was taken for a call beside the conversation"
    if request.is_streamed and answer.has_usage != request.asks_usage:
        yield "a usage chunk that was not asked for" if answer.has_usage else "no usage chunk"
    yield from compare_reply(answer.message, recorded.message)


def is_mended(turned: Sequence[Turned]) -> bool:
    """Whether a request was refused as too long, and a reduced one taken: what is meant to happen then."""
    statuses = [each.status for each in turned]
    return statuses == [400, 200] and OVERFLOW in (turned[0].refusal or b"")


def compare_reply(got: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterator[str]:
    """Where a reply is not the recorded one. A stream cannot tell null from empty content."""
    yield from _compare_text("content", got.get("content") or "", recorded.get("content") or "")
    ours, theirs = list(got.get("tool_calls") or ()), list(recorded.get("tool_calls") or ())
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        yield f"{len(ours)} tool calls instead of {len(theirs)}"
        return
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        yield from _compare_text(f"tool call {number}", json.dumps(our), json.dumps(their))


def _compare_text(name: str, got: object, wanted: object) -> Iterator[str]:
    ours, theirs = str(got), str(wanted)
    if ours == theirs:
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - 10)
    yield (
        f"{name} differs at character {at}: {_excerpt(ours[start:])} instead of {_excerpt(theirs[start:])} "
        f"({len(ours)} and {len(theirs)} characters)"
    )


def check_prefix(sent: Sequence[bytes], before: Sequence[bytes] | None, *, same_epoch: bool) -> Iterator[str]:
    """Within an epoch each request begins with the whole request before, unless that had to be mended.

    A closing request for an answer is said anew at the end of each call that needs it.
    """
    if before is None or not same_epoch:
        return
    if before and CLOSING in before[-1]:
        before = before[:-1]
    same = common(sent, before)
    if same < len(before):
        yield (
            f"the same epoch, but message {same} of the {len(before)} of the request before is not the same: "
            f"{_excerpt(before[same].decode('utf-8', 'replace'))} became "
            + (_excerpt(sent[same].decode("utf-8", "replace")) if same < len(sent) else "nothing")
        )


def is_orderly(messages: Sequence[Mapping[str, Any]], model: str) -> bool:
    """Whether a provider would have taken the client's own request."""
    return find_refusal({"model": model, "messages": list(messages)}) is None


def check_stored(conversation: Conversation, stored: Sequence[Stored], *, upto: int) -> Iterator[tuple[int, str]]:
    """Where the store does not hold the first ``upto`` messages of a conversation verbatim and in order.

    What the client sent has to be there byte for byte. A reply is stored as the model's host wrote it: its
    content and its calls have to be those of the recording.
    """
    expected = [(index, said) for index, said in enumerate(conversation.said[:upto])]
    if len(stored) != len(expected):
        yield -1, f"{len(stored)} messages are stored instead of {len(expected)}"
    for (index, said), held in zip(expected, stored, strict=False):
        if held.is_reply:
            for difference in compare_reply(json.loads(held.raw), said.message):
                yield index, f"stored: {difference}"
        elif held.raw != said.raw:
            yield (
                index,
                (
                    f"stored as {_excerpt(held.raw.decode('utf-8', 'replace'))} "
                    f"instead of {_excerpt(said.raw.decode('utf-8', 'replace'))}"
                ),
            )


def _error_message(body: bytes | None) -> str:
    try:
        return _excerpt(str(json.loads(body or b"")["error"]["message"]), 200)
    except (ValueError, KeyError, TypeError):
        return _excerpt((body or b"").decode("utf-8", "replace"), 200)


def _excerpt(text: str, limit: int = EXCERPT) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
