"""``/api/sessions/{id}/context`` and ``search``: looking at a session as a model would."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Request, Response

from app.api.rest import schemas
from app.api.rest.answers import answer, printable
from app.api.rest.guard import SessionId, Tenant, verbatim_items
from app.api.rest.schemas import BuildContext, SearchRequest
from app.domain.excerpts import parse_lookup, render_row
from app.domain.turns import write_turn_id
from app.service.previews import Preview, Previews, Wish, as_text
from app.service.search import Findings, Searcher


def contexts_router(previews: Previews, searcher: Searcher, router: APIRouter) -> None:
    """Add the routes."""

    @router.post(
        "/sessions/{session_id}/context",
        summary="Build a context",
        response_model=schemas.ContextOut,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def context(
        request: Request,
        tenant: Tenant,
        session_id: SessionId,
        body: BuildContext,
        accept: Annotated[str, Header(include_in_schema=False)] = "",
    ) -> Response:
        """The context of the session's next call, with its report. Nothing is stored or changed.

        With `format: "text"`, or `Accept: text/plain`, as text for people.

        422 with `needed` and `budget` when nothing valid fits `max_tokens`.
        """
        wish = Wish(
            dialect=body.dialect,
            strategy=body.strategy,
            epoch=body.epoch,
            model=body.model,
            max_tokens=body.max_tokens,
            messages=verbatim_items(request, "messages"),
            tools=body.tools,
        )
        preview = await previews.build(tenant, session_id, wish)
        if body.format == "text" or accept.lower().startswith("text/plain"):
            return Response(printable(as_text(preview, body.dialect)), media_type="text/plain; charset=utf-8")
        return answer(_write(preview))

    @router.post("/sessions/{session_id}/search", summary="Search a session", response_model=schemas.SearchOut)
    async def search(tenant: Tenant, session_id: SessionId, body: SearchRequest) -> Response:
        """`context_search`: the live history, superseded, dropped, undone and removed messages left out.

        `search` finds what contains the query as it stands, `relevant` what is most about it: its words in any form,
        the rare ones above all, and what stands near them.
        Message numbers are positions in that history; instructions are no part of it. An answer holds at most 200
        matches (the newest), 1,000 messages and 400,000 characters; when something is left out, the last line of
        `text` says so.
        """
        lookup = parse_lookup(body.model_dump(exclude_none=True))
        return answer(_write_findings(await searcher.look_up(tenant, session_id, lookup)))


def _write(preview: Preview) -> dict[str, Any]:
    report = preview.report
    return {
        "instructions": None if preview.text is None else printable(preview.text),
        "instruction_messages": [msgspec.Raw(raw) for raw in preview.instructions],
        "messages": [msgspec.Raw(raw) for raw in preview.messages],
        "strategy": preview.strategy,
        "report": {
            "tokens_before": report.tokens_before,
            "tokens_after": report.tokens_after,
            "epoch": {"number": report.epoch, "reason": report.reason, "cut": report.cut},
            "layers": [{"name": layer.name, "tokens": layer.tokens} for layer in report.layers],
            "turns": [
                {"turn": write_turn_id(told.turn), "kept": told.kept, "tokens": told.tokens, "reason": told.reason}
                for told in preview.turns
            ],
            "turns_omitted": preview.turns_omitted,
        },
    }


def _write_findings(findings: Findings) -> dict[str, Any]:
    return {
        "text": printable(findings.text),
        "excerpts": [
            {
                "first": excerpt.range.first,
                "last": excerpt.range.last,
                "messages": [
                    {
                        "number": row.position,
                        "seq": seq,
                        "turn": write_turn_id(row.turn),
                        "role": row.message.role,
                        "text": printable(render_row(row)),
                    }
                    for row, seq in zip(excerpt.rows, excerpt.seqs, strict=True)
                ],
            }
            for excerpt in findings.excerpts
        ],
        "total": findings.total,
        "truncated": findings.is_truncated,
    }
