"""``/api/sessions/{id}/context`` and ``search``: looking at a session as a model would."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Request, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant, verbatim_items
from tersely.api.rest.responses import json_response
from tersely.api.rest.schemas.contexts import BuildContext, ContextOut
from tersely.api.rest.schemas.search import SearchOut, SearchRequest
from tersely.api.rest.services import AppServices
from tersely.domain.history.turns import write_turn_id
from tersely.domain.search.excerpts import parse_lookup, render_row
from tersely.domain.text.encodable import encodable
from tersely.service.search.session_search import LookupResult
from tersely.service.sessions.previews import Preview, PreviewRequest, as_text

router = APIRouter(route_class=GuardedRoute)


@router.post(
    "/sessions/{session_id}/context",
    summary="Build a context",
    response_model=ContextOut,
    responses={200: {"x-alternative-content": {"text/plain": 'With `format: "text"`, or `Accept: text/plain`.'}}},
)
async def build_context(
    services: AppServices,
    request: Request,
    tenant: Tenant,
    session_id: SessionId,
    body: BuildContext,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Build the context of the session's next call, with its report. Nothing is stored or changed.

    With `format: "text"` or `Accept: text/plain` the answer is readable text.

    422 with `needed` and `budget` if no valid context fits into `max_tokens`.
    """
    options = PreviewRequest(
        dialect=body.dialect,
        strategy=body.strategy,
        epoch=body.epoch,
        model=body.model,
        max_tokens=body.max_tokens,
        messages=await verbatim_items(request, "messages"),
        tools=body.tools,
    )
    preview = await services.previews.build(tenant, session_id, options)
    if body.format == "text" or accept.lower().startswith("text/plain"):
        return Response(encodable(as_text(preview, body.dialect)), media_type="text/plain; charset=utf-8")
    return json_response(_write(preview))


@router.post("/sessions/{session_id}/search", summary="Search a session", response_model=SearchOut)
async def search_session(services: AppServices, tenant: Tenant, session_id: SessionId, body: SearchRequest) -> Response:
    """The tool `context_search`. It searches the live history, without superseded, dropped, undone and removed
    messages.

    `search` finds messages that contain the query literally. `relevant` ranks messages by the query's words in any
    grammatical form; rare words count most, and neighbouring messages count too. A question about the whole
    conversation (an order of events, a summary) gets turns in time order, a few lines of each. Message numbers are
    positions in the live history without instructions. An answer holds at most 200 matches (the newest), 1,000 messages
    and 400,000 characters. If something is left out, the last line of `text` says so.
    """
    lookup = parse_lookup(body.model_dump(exclude_none=True))
    return json_response(_write_findings(await services.searcher.search(tenant, session_id, lookup)))


def _write(preview: Preview) -> dict[str, Any]:
    report = preview.report
    return {
        "instructions": preview.text,
        "instruction_messages": [msgspec.Raw(raw) for raw in preview.instructions],
        "messages": [msgspec.Raw(raw) for raw in preview.messages],
        "strategy": preview.strategy,
        "report": {
            "tokens_before": report.tokens_before,
            "tokens_after": report.tokens_after,
            "epoch": {"number": report.epoch, "reason": report.reason, "cut": report.cut},
            "layers": [{"name": layer.name, "tokens": layer.tokens} for layer in report.layers],
            "turns": [
                {"turn": write_turn_id(turn.turn), "kept": turn.kept, "tokens": turn.tokens, "reason": turn.reason}
                for turn in preview.turns
            ],
            "turns_omitted": preview.turns_omitted,
        },
    }


def _write_findings(findings: LookupResult) -> dict[str, Any]:
    return {
        "text": findings.text,
        "excerpts": [
            {
                "first": excerpt.range.first,
                "last": excerpt.range.last,
                "messages": [
                    {
                        "number": row.number,
                        "seq": seq,
                        "turn": write_turn_id(row.turn),
                        "role": row.message.role,
                        "text": render_row(row),
                        "rank": row.rank or None,
                    }
                    for row, seq in zip(excerpt.rows, excerpt.seqs, strict=True)
                ],
            }
            for excerpt in findings.excerpts
        ],
        "total": findings.total,
        "truncated": findings.is_truncated,
    }
