"""Exchanges: a call's request and reply as one value, which can be kept in a file until the database is back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from tersely.domain.client_ids import ClientIds
from tersely.domain.history.links import MessageIdentity
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.text.encodable import with_encodable_texts
from tersely.store.commit.records import (
    Attribute,
    CallReport,
    EmptyReply,
    HiddenReplyParts,
    Mode,
    NewEpoch,
    NewReply,
    NewSession,
    ReferencedReply,
    ReplyWrite,
    RequestOutcome,
    RequestWrite,
)
from tersely.store.history.artifacts import Artifact

_SPOOLED_NAMES = {
    "hidden_parts": "said",
    "referenced": "named",
    "requested_at": "asked",
    "started_at": "started",
    "answered_at": "answered",
}


class Exchange(msgspec.Struct, frozen=True, kw_only=True, rename=_SPOOLED_NAMES):
    """A request and the reply to it, with all that storing both takes.

    ``decision`` was made on ``version`` of the session (None: it was to be made); without a decision, the session is
    looked for when the exchange is stored: by ``own_id`` (Tersely's own header), by ``client``, by the history.
    ``outcome`` is known where the request is stored already. ``requested_at`` and ``answered_at`` are the times of
    both.
    """

    id: str
    tenant: str
    dialect: str
    session_id: str
    own_id: str | None
    client: ClientIds
    create: NewSession | None
    mode: Mode
    incoming: list[MessageIdentity]
    raws: list[bytes]
    tokens: list[int]
    decision: Reconciliation | None
    version: int | None
    attributes: list[Attribute]
    open_chain: bytes | None
    hidden_parts: dict[int, HiddenReplyParts]
    referenced: ReferencedReply | None
    replaces_instructions: bool
    strategy: str | None
    epoch_policy: str | None
    key: str | None
    key_digest: bytes
    outcome: RequestOutcome | None
    replies: list[NewReply]
    report: CallReport
    epoch: NewEpoch | None
    requested_at: datetime
    started_at: datetime
    answered_at: datetime
    empty: EmptyReply | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exchange)


def encode(exchange: Exchange) -> bytes:
    """Return an exchange as bytes, with `encodable` texts: the database keeps no others either."""
    try:
        return _encoder.encode(exchange)
    except UnicodeEncodeError:
        return _encoder.encode(with_encodable_texts(msgspec.to_builtins(exchange, builtin_types=(bytes, datetime))))


def decode(payload: bytes) -> Exchange:
    """Return the inverse of `encode`. Raises `ValueError`."""
    return _decoder.decode(payload)


def exchange_of(write: ReplyWrite, *, own_id: str | None, client: ClientIds) -> Exchange:
    """Return the exchange of a call whose session is decided."""
    outcome, request = write.request_outcome, write.request.expanded()
    if outcome is not None and outcome.session_id != request.session_id:
        request = request.in_spare_session()
    assert request.exchange is not None
    return Exchange(
        id=request.exchange,
        tenant=request.tenant,
        dialect=request.dialect,
        session_id=request.session_id,
        own_id=own_id,
        client=client,
        create=request.create if request.session is None else None,
        mode=request.mode,
        incoming=list(request.incoming),
        raws=list(request.raws),
        tokens=list(request.tokens) or [0] * len(request.incoming),
        decision=request.decision,
        version=request.version,
        attributes=[*request.attributes, *write.attributes],
        open_chain=request.open_chain,
        hidden_parts=dict(request.hidden_parts),
        referenced=request.referenced,
        replaces_instructions=request.replaces_instructions,
        strategy=request.strategy,
        epoch_policy=request.epoch_policy,
        key=request.key,
        key_digest=request.key_digest,
        outcome=outcome,
        replies=list(write.replies),
        report=write.report,
        epoch=write.epoch,
        requested_at=request.now,
        started_at=write.started,
        answered_at=write.now,
        empty=write.empty,
    )


def write_of(
    exchange: Exchange,
    *,
    session_id: str,
    create: NewSession | None,
    decision: Reconciliation,
    spill: Callable[[int], Sequence[Artifact]],
) -> ReplyWrite:
    """Return the write of an exchange to a session. ``create``: how to create the session if it is missing."""
    request = RequestWrite(
        tenant=exchange.tenant,
        session_id=session_id,
        create=create,
        mode=exchange.mode,
        dialect=exchange.dialect,
        incoming=exchange.incoming,
        raws=exchange.raws,
        tokens=exchange.tokens,
        decision=decision,
        session=None,
        now=exchange.requested_at,
        attributes=exchange.attributes,
        spill=spill,
        open_chain=exchange.open_chain,
        hidden_parts=exchange.hidden_parts,
        replaces_instructions=exchange.replaces_instructions,
        strategy=exchange.strategy,
        epoch_policy=exchange.epoch_policy,
        key=exchange.key,
        key_digest=exchange.key_digest,
        referenced=exchange.referenced,
        exchange=exchange.id,
    )
    return ReplyWrite(
        request=request,
        replies=exchange.replies,
        empty=exchange.empty,
        report=exchange.report,
        started=exchange.started_at,
        now=exchange.answered_at,
        epoch=exchange.epoch,
    )
