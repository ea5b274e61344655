"""``/api/sessions/{id}/messages``, ``export``, ``import``, ``terse``: content, verbatim."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant, verbatim_items
from tersely.api.rest.responses import json_response, page_response, raw_value, write_time
from tersely.api.rest.schemas.common import MAX_SEQ, Limit
from tersely.api.rest.schemas.messages import AppendedOut, AppendMessages, MessagePage
from tersely.api.rest.services import AppServices
from tersely.domain.history.turns import write_turn_id
from tersely.service.sessions.messages import MAX_KEY, View
from tersely.store.history.messages import StoredMessage

After = Annotated[int, Query(ge=0, le=MAX_SEQ, description="A sequence number. The page starts after it.")]
Seq = Annotated[int, Path(ge=1, le=MAX_SEQ, description="The message's sequence number.")]
Key = Annotated[
    str | None,
    Header(
        json_schema_extra={"minLength": 1, "maxLength": MAX_KEY},
        description="A second request with the same key and messages stores nothing and gets the same answer.",
    ),
]


router = APIRouter(route_class=GuardedRoute)


@router.post(
    "/sessions/{session_id}/messages",
    status_code=201,
    summary="Append messages",
    response_model=AppendedOut,
)
async def append_messages(
    services: AppServices,
    request: Request,
    tenant: Tenant,
    session_id: SessionId,
    body: AppendMessages,
    idempotency_key: Key = None,
) -> Response:
    """Append messages to a session. A new session is created if it does not exist.

    Messages are stored byte for byte. If the strategy asks models for terse summaries, tags in replies go to the terse
    log, as in a proxied call. System and developer messages replace the session's earlier ones.

    `created_at` gives the times of an older conversation. Strategies that depend on time, the exported `ts`, the turns'
    times and the daily memory use these times. The messages keep their order in the history, even if the times do not
    ascend. The session's own time of last use is now.
    """
    raws = await verbatim_items(request, "messages")
    done = await services.messages.append(
        tenant,
        session_id,
        raws,
        dialect=body.dialect,
        key=idempotency_key,
        times=body.created_at,
        model=body.model or "",
    )
    where = {
        "first_seq": done.first_seq,
        "last_seq": done.last_seq,
        "turn": None if done.turn is None else write_turn_id(done.turn),
    }
    return json_response(where, 201, {"Idempotent-Replayed": "true"} if done.was_stored_before else None)


@router.get("/sessions/{session_id}/messages", summary="List messages", response_model=MessagePage)
async def list_messages(
    services: AppServices,
    tenant: Tenant,
    session_id: SessionId,
    view: View = "client",
    after: After = 0,
    limit: Limit = 100,
) -> Response:
    """List messages as the client saw them, as the model sees them, or all that are stored.

    `client` and `model` list live messages in the order of the history, with `raw` in that view. `all` lists every
    message in the order of arrival, with its status and both views. A page is cut short at 8 MiB.
    """
    found, following = await services.messages.page(tenant, session_id, view=view, after=after, limit=limit)
    return page_response([write_message(message, view) for message in found], following)


def write_message(message: StoredMessage, view: View) -> dict[str, Any]:
    """Return a stored message as JSON members, in one view."""
    written: dict[str, Any] = {
        "seq": message.seq,
        "turn": write_turn_id(message.turn) if message.turn else None,
        "role": message.role,
        # A message that is hidden from the model alone counts as live here.
        "status": "live" if message.status == "dropped" and not message.model_visible else message.status,
        "dialect": message.dialect,
        "tokens": message.tokens,
        "pinned": message.pinned,
        "priority": message.priority,
        "finish": message.finish,
        "created_at": write_time(message.created_at),
    }
    if view == "all":
        return written | {
            "client_visible": message.client_visible,
            "model_visible": message.model_visible,
            "raw": raw_value(message.raw),
            "model_raw": raw_value(message.model_raw),
        }
    raw = message.model_raw if view == "model" and message.model_raw is not None else message.raw
    return written | {"raw": raw_value(raw)}
