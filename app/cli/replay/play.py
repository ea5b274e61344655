"""One conversation played through the proxy, call by call, measured and checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from app.cli.replay.checks import Failure, Stored, check_answer, check_prefix, check_stored, is_mended, is_orderly
from app.cli.replay.client import Answer, Request, ask, history_before
from app.cli.replay.measure import Counter, Tally, measure, own_tokens
from app.cli.replay.model import KEY_HEADER, Expected, RecordedModel, Turned, chance
from app.cli.replay.references import Past
from app.cli.replay.transcripts import Conversation
from app.dialects import raw_json
from app.domain.errors import TerselyError

STREAMED = 0.5
ASKS_USAGE = 0.5
MAX_FAILURES = 5

ReadStore = Callable[[str], Awaitable[Sequence[Stored]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A strategy and an epoch policy, as they stand in request headers."""

    strategy: str
    epoch: str

    @property
    def name(self) -> str:
        """For tables. ``full`` never cuts, so that its policy does not matter."""
        return self.strategy if self.strategy == "full" else f"{self.strategy}, {self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where conversations are played. ``share`` of the replies get a tag."""

    http: aiohttp.ClientSession
    address: str
    model: RecordedModel
    model_name: str
    share: float
    counter: Counter


@dataclass(slots=True, kw_only=True)
class Played:
    """What came of a conversation."""

    tally: Tally
    session: str = ""
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """The call before, which the next one is held against."""

    given: Sequence[bytes]
    sent: Sequence[bytes]
    epoch: str
    is_orderly: bool


async def play(
    stage: Stage,
    variant: Variant,
    conversation: Conversation,
    past: Past,
    *,
    headers: Mapping[str, str],
    read_store: ReadStore,
    progress: Callable[[], None],
) -> Played:
    """Play both sides of a conversation, then look into the store. ``headers`` go with every request."""
    played = Played(tally=Tally(conversations=1))
    before: _Before | None = None
    for index in conversation.calls:
        request = _request(stage, variant, conversation, index, headers)
        seed = (conversation.id, conversation.number, index)
        key = request.headers[KEY_HEADER]
        stage.model.expect(key, Expected(message=conversation.said[index].message, seed=seed, share=stage.share))
        answer = await ask(stage.http, stage.address, request)
        turned = stage.model.collect(key)
        faults = list(check_answer(request, answer, turned, conversation.said[index]))
        faults += _check_session(played, answer)
        if turned:
            now = _look_at(stage, conversation, index, request, answer, turned[-1])
            if before is None or before.is_orderly:
                faults += check_prefix(
                    now.sent,
                    before.sent if before else None,
                    same_epoch=before is not None and before.epoch == now.epoch,
                )
            played.tally += _tally(stage, conversation, index, past, now, before, answer)
            played.tally += Tally(overflows=int(is_mended(turned)))
            before = now
        _note(played, variant, conversation, index, faults)
        progress()
        if answer.message is None:
            return played
    if played.session:
        await _look_into_store(played, variant, conversation, read_store)
    return played


async def _look_into_store(played: Played, variant: Variant, conversation: Conversation, read_store: ReadStore) -> None:
    try:
        stored = await read_store(played.session)
    except TerselyError as error:
        _note(played, variant, conversation, -1, [f"the store could not be read: {error}"])
        return
    for index, fault in check_stored(conversation, stored, upto=conversation.calls[-1] + 1):
        _note(played, variant, conversation, index, [fault])


def _request(
    stage: Stage, variant: Variant, conversation: Conversation, index: int, headers: Mapping[str, str]
) -> Request:
    seed = (conversation.id, conversation.number, index)
    return Request(
        messages=history_before(conversation, index),
        model=stage.model_name,
        is_streamed=chance("stream", *seed) < STREAMED,
        asks_usage=chance("stream", *seed) < STREAMED * ASKS_USAGE,
        headers={
            **headers,
            KEY_HEADER: f"{variant.name}/{conversation.number}/{index}/{id(conversation)}",
            "x-tersely-strategy": variant.strategy,
            "x-tersely-epoch": variant.epoch,
        },
    )


def _check_session(played: Played, answer: Answer) -> list[str]:
    if not answer.session or answer.session == played.session:
        return []
    known, played.session = played.session, answer.session
    return ["a session of its own, though the conversation had one"] if known else []


def _look_at(
    stage: Stage, conversation: Conversation, index: int, request: Request, answer: Answer, turned: Turned
) -> _Before:
    sent = raw_json.split_array(raw_json.split_object(turned.body)["messages"])
    given: list[Mapping[str, Any]] = [said.message for said in conversation.said[:index]]
    return _Before(
        given=request.messages,
        sent=sent,
        epoch=answer.epoch,
        is_orderly=is_orderly(given, stage.model_name),
    )


def _tally(
    stage: Stage,
    conversation: Conversation,
    index: int,
    past: Past,
    now: _Before,
    before: _Before | None,
    answer: Answer,
) -> Tally:
    counter = stage.counter
    own = own_tokens(counter, now.sent, now.given)
    overhead = answer.headers.get("x-tersely-overhead-ms")
    return Tally(
        calls=1,
        client=measure(counter, now.given, before.given if before else None),
        model=measure(counter, now.sent, before.sent if before else None, own=own),
        losses=past.losses(conversation.said[index].message, index, b"\n".join(now.sent)),
        epochs=int(before is None or before.epoch != now.epoch),
        overhead_ms=(float(overhead),) if overhead else (),
    )


def _note(played: Played, variant: Variant, conversation: Conversation, index: int, faults: Sequence[str]) -> None:
    for fault in faults:
        if len(played.failures) >= MAX_FAILURES:
            return
        played.failures.append(
            Failure(
                strategy=variant.name,
                conversation=f"{conversation.id} (line {conversation.number})",
                call=index,
                what=fault,
            )
        )
