"""``/api/sessions/{id}/messages``, ``export``, ``import``, ``terse``: content, verbatim."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from app.api.rest import schemas
from app.api.rest.answers import answer, moment, page, printable, verbatim
from app.api.rest.guard import SessionId, Tenant, verbatim_items
from app.api.rest.schemas import MAX_SEQ, AppendMessages, ImportSession, Limit, PutPriority
from app.api.rest.sessions import write_session
from app.domain.errors import InvalidRequest
from app.domain.turns import write_turn_id
from app.service.exports import Exports, Import, write_entry
from app.service.marks import Marks
from app.service.messages import Messages, View
from app.service.sessions import Change
from app.store.messages import StoredMessage
from app.store.terse import Place

After = Annotated[int, Query(ge=0, le=MAX_SEQ, description="A sequence number; the page starts behind it.")]
Seq = Annotated[int, Path(ge=1, le=MAX_SEQ, description="The message's sequence number.")]
Key = Annotated[
    str | None,
    Header(description="A second request with the same key and messages stores nothing and answers the same."),
]


def messages_router(service: Messages, router: APIRouter) -> None:
    """Add the routes."""

    @router.post(
        "/sessions/{session_id}/messages",
        status_code=201,
        summary="Append messages",
        response_model=schemas.AppendedOut,
    )
    async def append(
        request: Request,
        tenant: Tenant,
        session_id: SessionId,
        body: AppendMessages,
        idempotency_key: Key = None,
    ) -> Response:
        """Put messages at the end of a session, which is made if it is new.

        They are stored byte for byte. Where the strategy asks models for terse summaries, tags in replies go to the
        terse log, as in a proxied call. System and developer messages replace those that the session has.
        """
        raws = verbatim_items(request, "messages")
        done = await service.append(tenant, session_id, raws, dialect=body.dialect, key=idempotency_key)
        where = {
            "first_seq": done.first_seq,
            "last_seq": done.last_seq,
            "turn": None if done.turn is None else write_turn_id(done.turn),
        }
        return answer(where, 201, {"Idempotent-Replayed": "true"} if done.was_stored_before else None)

    @router.get("/sessions/{session_id}/messages", summary="List messages", response_model=schemas.MessagePage)
    async def listed(
        tenant: Tenant,
        session_id: SessionId,
        view: View = "client",
        after: After = 0,
        limit: Limit = 100,
    ) -> Response:
        """Messages as the client saw them, as the model sees them, or all that are stored.

        `client` and `model` show what is live, in the order of the history, with `raw` in that view. `all` shows
        every message in the order of arrival, with its status and both views. A page ends early when it is over
        8 MiB.
        """
        found, following = await service.page(tenant, session_id, view=view, after=after, limit=limit)
        return page([_write(message, view) for message in found], following)


def marks_router(service: Marks, router: APIRouter) -> None:
    """Add the routes."""

    @router.post(
        "/sessions/{session_id}/messages/{seq}/pin", summary="Pin a message", response_model=schemas.MessageOut
    )
    async def pin(tenant: Tenant, session_id: SessionId, seq: Seq) -> Response:
        """From the next context on it is in every one, even if it was cut before."""
        return answer(_write(await service.pin(tenant, session_id, seq, pinned=True), "all"))

    @router.delete(
        "/sessions/{session_id}/messages/{seq}/pin", summary="Unpin a message", response_model=schemas.MessageOut
    )
    async def unpin(tenant: Tenant, session_id: SessionId, seq: Seq) -> Response:
        return answer(_write(await service.pin(tenant, session_id, seq, pinned=False), "all"))

    @router.put(
        "/sessions/{session_id}/messages/{seq}/priority",
        summary="Say how important a message is",
        response_model=schemas.MessageOut,
    )
    async def set_priority(tenant: Tenant, session_id: SessionId, seq: Seq, body: PutPriority) -> Response:
        """`tiered` keeps turns with important messages longer."""
        return answer(_write(await service.set_priority(tenant, session_id, seq, body.priority), "all"))


def exports_router(service: Exports, router: APIRouter, *, strategy: str, epoch: str) -> None:
    """Add the routes. ``strategy`` and ``epoch`` are the configured defaults."""

    @router.get("/sessions/{session_id}/terse", summary="The terse log", response_model=schemas.TersePage)
    async def terse(
        tenant: Tenant,
        session_id: SessionId,
        after: Annotated[str | None, Query(max_length=60)] = None,
        limit: Limit = 100,
    ) -> Response:
        """What the model said about each turn, and what was derived where it said nothing."""
        found, following = await service.log(tenant, session_id, after=_read_place(after), limit=limit)
        items = [{name: printable(text) for name, text in write_entry(entry).items()} for entry in found]
        return page(items, None if following is None else ".".join(map(str, following)))

    @router.get("/sessions/{session_id}/export", summary="Export a session", response_model=schemas.ExportOut)
    async def export(tenant: Tenant, session_id: SessionId) -> Response:
        """The live history and its terse log as one document, streamed, and what makes an import the same session."""
        pieces = service.export(tenant, session_id)
        first = await anext(pieces)
        return StreamingResponse(_chain(first, pieces), media_type="application/json")

    @router.post("/sessions/import", status_code=201, summary="Import a session", response_model=schemas.SessionOut)
    async def take_in(request: Request, tenant: Tenant, body: ImportSession) -> Response:
        """A new session from an exported document; an export of it gives the same document again."""
        given = Import(
            id=body.id,
            parent=body.parent,
            dialect=body.dialect,
            context=verbatim_items(request, "context"),
            terse=body.terse,
            configuration=Change(strategy=body.strategy, epoch=body.epoch, metadata=body.metadata),
            copy=body.tersely,
        )
        return answer(write_session(await service.take_in(tenant, given), strategy=strategy, epoch=epoch), 201)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _write(message: StoredMessage, view: View) -> dict[str, Any]:
    written: dict[str, Any] = {
        "seq": message.seq,
        "turn": write_turn_id(message.turn) if message.turn else None,
        "role": message.role,
        "status": message.status,
        "dialect": message.dialect,
        "tokens": message.tokens,
        "pinned": message.pinned,
        "priority": message.priority,
        "finish": message.finish,
        "created_at": moment(message.created_at),
    }
    if view == "all":
        return written | {
            "client_visible": message.client_visible,
            "model_visible": message.model_visible,
            "raw": verbatim(message.raw),
            "model_raw": verbatim(message.model_raw),
        }
    raw = message.model_raw if view == "model" and message.model_raw is not None else message.raw
    return written | {"raw": verbatim(raw)}


def _read_place(text: str | None) -> Place:
    if text is None:
        return 0, 0, 0
    steps = text.split(".")
    if len(steps) != 3 or not all(step.isascii() and step.isdigit() and len(step) < 19 for step in steps):
        raise InvalidRequest("after must be the `next` of a page before", field="after")
    turn, seq, number = map(int, steps)
    return min(turn, schemas.MAX_TURN), seq, min(number, schemas.MAX_TURN)
