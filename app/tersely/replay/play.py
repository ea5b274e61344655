"""Play one conversation through the proxy, call by call, with measurements and checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest, TerselyError
from tersely.domain.messages import Dialect as DialectName
from tersely.replay.checks import (
    CheckFailure,
    StoredClientMessage,
    check_links,
    check_prefix,
    check_reply,
    check_side_call,
    check_stored,
    is_mended,
    is_orderly,
)
from tersely.replay.client import ClientReply, ask
from tersely.replay.edit_readiness import EditCounter
from tersely.replay.lost_references import PastIdentifiers
from tersely.replay.measure import Counter, ReplayTotals, RequestParts, common, measure, take_apart
from tersely.replay.model import KEY_HEADER, ExpectedReply, RecordedModel, RecordedRequest, chance
from tersely.transcripts.conversations import Conversation, RecordedCall, ReplayRequest, ReplyForm
from tersely.transcripts.recordings import going_on_from

STREAMED = 0.5
HAS_OPTION = 0.5
ARRAYS = frozenset({"gemini", "gemini_gca"})
MAX_FAILURES = 200

_ROLE: Mapping[DialectName, Mapping[str, Any]] = {
    "openai_chat": {"role": "assistant"},
    "anthropic": {"role": "assistant"},
    "gemini": {"role": "model"},
    "gemini_gca": {"role": "model"},
    "openai_responses": {},
}

ReadStore = Callable[[str], Awaitable[Sequence[StoredClientMessage]]]


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
class ReplaySetting:
    """The setting of a replay. ``share`` of the replies get a tag."""

    http: aiohttp.ClientSession
    address: str
    model: RecordedModel
    model_name: str
    share: float
    counter: Counter
    edits: EditCounter = field(default_factory=EditCounter)


@dataclass(slots=True, kw_only=True)
class PlayedConversation:
    """The result of a conversation. ``sessions``: those that the proxy named.

    ``ids`` and ``histories`` are keyed by the indexes of the steps that others continue from: the ids of their
    replies, and the histories up to them.
    """

    tally: ReplayTotals
    ids: dict[int, str] = field(default_factory=dict)
    histories: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    sessions: dict[str, _PlayedSession] = field(default_factory=dict)
    failures: list[CheckFailure] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _PlayedSession:
    """A session's last call; for recordings also every message that the client sent in it, and in which dialects."""

    last: _PlayedCall
    sent: set[bytes] = field(default_factory=set)
    dialects: set[DialectName] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlayedCall:
    """A finished call: the client's request and the request to the model, in the form in which they are priced.

    ``sent_messages``: the messages that the client sent or referred to. ``is_orderly``: a provider would accept them.
    """

    step: RecordedCall
    sent_history: tuple[bytes, ...]
    given: RequestParts
    sent: RequestParts
    epoch: str
    is_orderly: bool


async def play(
    stage: ReplaySetting,
    variant: Variant,
    conversation: Conversation,
    past: PastIdentifiers,
    *,
    headers: Mapping[str, str],
    read_store: ReadStore,
    progress: Callable[[], None],
) -> PlayedConversation:
    """Play both sides of a conversation, then look into the store. ``headers`` go with every request."""
    played = PlayedConversation(tally=ReplayTotals())
    for number, step in enumerate(conversation.steps):
        key = f"{variant.name}/{conversation.number}/{number}/{id(conversation)}"
        sent = {
            **headers,
            KEY_HEADER: key,
            "x-tersely-strategy": variant.strategy,
            "x-tersely-epoch": variant.epoch,
        }
        request, expected = _ready(stage, conversation, step)
        if step.follows is not None and step.follows in played.ids:
            request = going_on_from(request, played.ids[step.follows])
        stage.model.expect(key, expected)
        answer = await ask(stage.http, stage.address, request, sent)
        turned = stage.model.collect(key)
        if answer.message is not None and answer.message.get("id"):
            played.ids[step.index] = answer.message["id"]
        faults = list(check_reply(request, answer, turned, step))
        if turned and answer.session:
            faults += _check_session(played, conversation, answer)
            call = _look_at(step, request, answer, turned[-1], played.histories.get(step.follows or -1, ()))
            faults += _count(stage, played, call, past, answer)
            if conversation.is_recording:
                if step.dialect == "openai_responses" and step.reply is not None:
                    played.histories[step.index] = (*call.sent_history, _recorded_reply(step))
                played.sessions[answer.session].sent.update(call.sent_history)
                played.sessions[answer.session].dialects.add(step.dialect)
            played.tally += ReplayTotals(overflows=int(is_mended(turned)))
        elif answer.message is not None:
            faults += _check_beside(conversation, request, turned)
            played.tally += ReplayTotals(beside=1)
        _note(played, variant, conversation, step.index, faults)
        progress()
        if answer.message is None and not conversation.is_recording:
            break
    played.tally += ReplayTotals(conversations=len(played.sessions) if conversation.is_recording else 1)
    for name, session in played.sessions.items():
        await _look_into_store(played, variant, conversation, name, session, read_store)
    return played


def _ready(stage: ReplaySetting, conversation: Conversation, step: RecordedCall) -> tuple[ReplayRequest, ExpectedReply]:
    """Return the client's request of a call, and prepare the model's reply."""
    seed = (conversation.id, conversation.number, step.index)
    expected = ExpectedReply(message=step.reply, seed=seed, share=stage.share, dialect=step.dialect)
    return step.request(_reply_form(stage, conversation, step)), expected


def _reply_form(stage: ReplaySetting, conversation: Conversation, step: RecordedCall) -> ReplyForm:
    """Choose the form of a reply, the same throughout a conversation, as clients do. Half of the conversations are
    streamed; Gemini's JSON arrays are for programs without event streams.
    """
    if step.dialect in ARRAYS and chance("array", conversation.id, conversation.number) < HAS_OPTION:
        return ReplyForm(model=stage.model_name, is_streamed=True, has_option=True)
    draw = chance("stream", conversation.id, conversation.number)
    has_option = step.dialect not in ARRAYS and draw < STREAMED * HAS_OPTION
    return ReplyForm(model=stage.model_name, is_streamed=draw < STREAMED, has_option=has_option)


def _check_session(played: PlayedConversation, conversation: Conversation, answer: ClientReply) -> list[str]:
    """Check that a transcript's conversation is one session. For a client's own requests the sessions are unknown."""
    is_strange = played.sessions and answer.session not in played.sessions and not conversation.is_recording
    return ["a session of its own, though the conversation had one"] if is_strange else []


def _check_beside(conversation: Conversation, request: ReplayRequest, turned: Sequence[RecordedRequest]) -> list[str]:
    if conversation.is_recording:
        return list(check_side_call(request, turned))
    return ["no session: it was taken for a call beside the conversation"]


def _look_at(
    step: RecordedCall, request: ReplayRequest, answer: ClientReply, turned: RecordedRequest, history: tuple[bytes, ...]
) -> _PlayedCall:
    """Look up the result of a call. ``history``: the messages that the request refers to without sending them."""
    try:
        sent_messages = tuple(message.raw for message in DIALECTS[step.dialect].read_request(request.body).messages)
    except InvalidRequest:
        sent_messages = ()
    return _PlayedCall(
        step=step,
        sent_history=(*history, *sent_messages),
        given=take_apart(request.body, step.dialect),
        sent=take_apart(turned.body, step.dialect),
        epoch=answer.epoch,
        is_orderly=is_orderly(request),
    )


def _count(
    stage: ReplaySetting, played: PlayedConversation, now: _PlayedCall, past: PastIdentifiers, answer: ClientReply
) -> list[str]:
    """Add a call to the figures of its session; what is wrong with its beginning."""
    session = played.sessions.get(answer.session)
    before = session.last if session else None
    played.tally += _tally(stage, past, now, before, answer)
    if session:
        session.last = now
    else:
        played.sessions[answer.session] = _PlayedSession(last=now)
    if before is None or not before.is_orderly or not _goes_on(now, before):
        return []
    return list(check_prefix(now.sent, before.sent, same_epoch=before.epoch == now.epoch))


def _goes_on(now: _PlayedCall, before: _PlayedCall) -> bool:
    """Return whether the client's own request begins with its whole previous request; some clients rewrite their
    history.
    """
    same_dialect = now.step.dialect == before.step.dialect
    return same_dialect and common(now.given.blocks, before.given.blocks) == len(before.given.blocks)


def _tally(
    stage: ReplaySetting, past: PastIdentifiers, now: _PlayedCall, before: _PlayedCall | None, answer: ClientReply
) -> ReplayTotals:
    counter = stage.counter
    overhead = answer.headers.get("x-tersely-overhead-ms")
    return ReplayTotals(
        calls=1,
        client=measure(counter, now.given, before.given if before else None),
        model=measure(counter, now.sent, before.sent if before else None, given=now.given),
        losses=past.losses(now.step, b"\n".join(now.given.messages), b"\n".join(now.sent.messages)),
        edits=stage.edits.count(now.step, now.sent.messages, now.sent.dialect),
        epochs=int(before is None or before.epoch != now.epoch),
        overhead_ms=(float(overhead),) if overhead else (),
    )


async def _look_into_store(
    played: PlayedConversation,
    variant: Variant,
    conversation: Conversation,
    name: str,
    session: _PlayedSession,
    read_store: ReadStore,
) -> None:
    try:
        stored = await read_store(name)
    except TerselyError as error:
        _note(played, variant, conversation, -1, [f"the store could not be read: {error}"])
        return
    last = session.last
    dialect = last.step.dialect
    if last.step.reply is None:
        stored = stored[:-1]  # nobody knows what the reply was
    expected = [*last.sent_history, *([_recorded_reply(last.step)] if last.step.reply is not None else [])]
    if len(session.dialects) > 1:
        return  # a message of one dialect is written again in another
    if conversation.is_recording:
        faults = check_links(expected, session.sent, stored, dialect)
    else:
        faults = check_stored(expected, stored, dialect)
    for index, fault in faults:
        _note(played, variant, conversation, index, [fault])


def _recorded_reply(step: RecordedCall) -> bytes:
    return raw_json.dump({**_ROLE[step.dialect], **(step.reply or {})})


def _note(
    played: PlayedConversation, variant: Variant, conversation: Conversation, call: int, faults: Sequence[str]
) -> None:
    for fault in faults:
        if len(played.failures) >= MAX_FAILURES:
            return
        played.failures.append(
            CheckFailure(
                strategy=variant.name,
                conversation=f"{conversation.id} (line {conversation.number})",
                call=call,
                what=fault,
                unit="request" if conversation.is_recording else "message",
            )
        )
