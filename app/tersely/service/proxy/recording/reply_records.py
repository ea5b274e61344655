"""The records of a reply's messages, as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from tersely.dialects.account_ids import find_named_ids
from tersely.dialects.dialect import Dialect, Reply, Request
from tersely.dialects.undescribed import payloads_as_json
from tersely.domain.history.history import BROKE_OFF
from tersely.domain.messages import Message, Text, ToolCall
from tersely.service.common import tokens
from tersely.service.common.metrics import Metrics
from tersely.service.proxy.recording.call_reports import storable_name
from tersely.service.proxy.recording.round_transcript import HiddenMessage
from tersely.service.recognition.incoming_history import Prefill, digest, extend
from tersely.store.commit.records import EmptyReply, HistoryOwner, NewReply
from tersely.store.history.artifacts import spilled

MAX_REPLY_ID = 200
UNREAD = "unread"
"""The finish reason of a reply that could not be parsed."""


def leaves_no_message(replies: Sequence[NewReply]) -> bool:
    """Return whether a reply of these records is in no history: it was empty, or could not be parsed."""
    return not replies or (replies[0].finish == UNREAD and len(replies) == 1)


# A tenant, and ids that a provider gave to its reply and the items of it.
OnIds = Callable[[str, Sequence[str]], None]


class ReplyRecords:
    """Makes records of the replies of one dialect."""

    def __init__(self, dialect: Dialect, metrics: Metrics, on_ids: OnIds | None) -> None:
        """``on_ids``: see `Recorder`."""
        self._dialect = dialect
        self._metrics = metrics
        self._on_ids = on_ids

    def choices(
        self,
        tenant: str,
        request: Request,
        reply: Reply,
        *,
        head_chain: bytes,
        prefill: Prefill | None,
        is_whole: bool,
        history_owner: HistoryOwner,
        cut_off: str = BROKE_OFF,
    ) -> list[NewReply]:
        """Return the choices of a reply for the store. ``cut_off`` is how a reply ended that is not whole.

        Choices that continue a ``prefill`` are stored a second time, each as one message with the prefill.
        """
        found: list[NewReply] = []
        joined: list[NewReply] = []
        prefill = prefill if self._dialect.continues_prefill else None
        reply_id = self._id_of(reply)
        for choice in reply.choices:
            client = self._dialect.read_reply(choice.client_message)
            is_same = choice.model_message == choice.client_message
            model = client if is_same else self._dialect.read_reply(choice.model_message)
            if not model.parts:
                continue
            model_raw: bytes | None = choice.model_message
            is_malformed = client.is_malformed or model.is_malformed
            if is_malformed or model.role != "assistant":
                model_raw = self._as_described(model)
            identity_of_reply, _ = digest(client)
            finish = storable_name(choice.finish_reason) or (None if is_whole else cut_off)
            is_named = (request.is_stored or self._on_ids is not None) and not client.is_malformed
            items = self._note_ids(tenant, reply_id, reply.container, choice.client_message) if is_named else ()
            found.append(
                NewReply(
                    raw=choice.client_message if model_raw is not None else payloads_as_json((choice.client_message,)),
                    model_raw=model_raw if model_raw != choice.client_message else None,
                    digest=identity_of_reply,
                    chain=extend(head_chain, identity_of_reply),
                    tokens=tokens.count_message(model, request.model),
                    finish=finish,
                    terse=tuple([(text, "model") for text in choice.terse]),
                    # An incomplete block would replace a complete earlier one.
                    state=choice.state if is_whole else None,
                    is_alternative=model_raw is None or any(not each.is_alternative for each in found),
                    id=reply_id,
                    history_owner=history_owner if is_whole else "tersely",
                    items=items,
                    is_text_only=bool(request.tools) and not client.calls,
                )
            )
            if prefill is not None and not is_malformed:
                joined.append(self._with_prefill(found[-1], prefill, request.model))
        found += joined
        if reply.unread:
            found.append(self._unread(reply.unread, head_chain))
        return found

    def empty(self, tenant: str, reply: Reply, *, is_whole: bool, history_owner: HistoryOwner) -> EmptyReply | None:
        """Return the record of a reply whose choices leave no message; None where its id means nothing to its client.

        One that failed or broke off before its first item is no answer: its question may be sent again.
        """
        reply_id = self._id_of(reply)
        if not reply_id:
            return None
        if self._on_ids is not None:
            self._on_ids(tenant, [reply_id])
        if reply.error or not is_whole:
            return None
        return EmptyReply(
            id=reply_id, history_owner=history_owner, usage=(reply.usage or None) if reply.rounds > 1 else None
        )

    def _with_prefill(self, reply: NewReply, prefill: Prefill, model: str) -> NewReply:
        """Return a reply as one message with its prefill. Some hosts repeat the prefill in the reply."""

        def join(raw: bytes) -> bytes:
            text = self._dialect.read_reply(raw).text
            return raw if text.startswith(prefill.text) else self._dialect.with_text(raw, prefill.text + text)

        raw = join(reply.raw)
        model_raw = join(reply.model_raw or reply.raw)
        message = self._dialect.read_reply(raw)
        identity, _ = digest(message)
        return structs.replace(
            reply,
            raw=raw,
            model_raw=model_raw if model_raw != raw else None,
            digest=identity,
            chain=extend(prefill.chain_before, identity),
            tokens=tokens.count_message(message, model),
            is_alternative=True,
            id="",
            items=(),
        )

    def _as_described(self, reply: Message) -> bytes | None:
        """Return text and calls of a reply of an unknown shape, as the provider accepts them; None without any."""
        parts = tuple(part for part in reply.parts if isinstance(part, Text | ToolCall))
        return self._dialect.write_message(Message(role="assistant", parts=parts, raw=b"")) if parts else None

    def _unread(self, payloads: Sequence[bytes], head_chain: bytes) -> NewReply:
        """Return a reply that could not be parsed, byte for byte. No context contains it."""
        self._metrics.unread_replies.labels(self._dialect.name).inc()
        raw = payloads_as_json(payloads)
        identity, _ = digest(self._dialect.read_reply(raw))
        return NewReply(
            raw=raw,
            model_raw=None,
            digest=identity,
            chain=extend(head_chain, identity),
            tokens=0,
            finish=UNREAD,
            is_alternative=True,
        )

    def _id_of(self, reply: Reply) -> str:
        """Return the id by which the client may continue from a reply; empty if there is none."""
        return reply.id if self._dialect.lacks_history is not None and _is_usable(reply.id) else ""

    def _note_ids(self, tenant: str, reply_id: str, container: str, message: bytes) -> tuple[str, ...]:
        """Return the ids by which the client may reference items of a reply, and report them where tenants share an
        account: then with those of the other objects that the reply created.
        """
        references = self._dialect.references
        names = references.items_by_id(message) if references is not None else ()
        if self._on_ids is None:
            return tuple(filter(_is_usable, names))
        items = tuple(filter(_is_usable, (*names, *find_named_ids(self._dialect.name, message), container)))
        self._on_ids(tenant, [name for name in (reply_id, *items) if name])
        return items

    def as_input(self, reply: NewReply) -> NewReply:
        """Return a reply of several rounds in the form in which the model is sent it again."""
        return structs.replace(reply, model_raw=self._dialect.as_input(reply.model_raw)) if reply.model_raw else reply

    def hidden(self, messages: Sequence[HiddenMessage], model: str) -> list[NewReply]:
        """Return messages hidden from the client. `model_raw` marks them: a client's own messages have none."""
        read = [self._dialect.read_message(hidden.raw) for hidden in messages]
        return [
            NewReply(
                raw=hidden.raw,
                model_raw=hidden.raw,
                digest=digest(message)[0],
                chain=None,
                tokens=tokens.count_message(message, model),
                finish=storable_name(hidden.choice.finish_reason) if hidden.choice else None,
                terse=tuple((text, "model") for text in hidden.choice.terse) if hidden.choice else (),
                state=hidden.choice.state if hidden.choice else None,
                role=message.role,
                spilled=tuple(spilled(read, index)),
            )
            for index, (hidden, message) in enumerate(zip(messages, read, strict=True))
        ]


def _is_usable(name: str) -> bool:
    return 0 < len(name) <= MAX_REPLY_ID and name.isprintable()
