"""``/api/artifacts/{sha256}``: an oversized tool output, whole."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from app.api.rest.guard import Tenant
from app.service.artifacts import Artifacts

MEDIA_TYPE = "text/plain; charset=utf-8"

Sha256 = Annotated[str, Path(description="Of the output in UTF-8, in lower-case hex, as the notice in its place says.")]


def artifacts_router(service: Artifacts, router: APIRouter) -> None:
    """Add the route."""

    @router.get(
        "/artifacts/{sha256}",
        summary="A spilled tool output",
        response_class=Response,
        responses={
            200: {"description": "The output, whole", "content": {"text/plain": {"schema": {"type": "string"}}}}
        },
    )
    async def artifact(tenant: Tenant, sha256: Sha256) -> Response:
        """The text as the tool gave it. A lone surrogate, which UTF-8 has no place for, is given as its three bytes.

        Outputs of more than 204,800 characters are kept so, as long as their session and turn are.
        """
        return Response(await service.get(tenant, sha256), media_type=MEDIA_TYPE)
