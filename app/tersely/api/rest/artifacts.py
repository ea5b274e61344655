"""``/api/artifacts/{sha256}``: an oversized tool output, whole."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from tersely.api.rest.guard import GuardedRoute, Tenant
from tersely.api.rest.services import AppServices

MEDIA_TYPE = "text/plain; charset=utf-8"

Sha256 = Annotated[
    str,
    Path(
        description=(
            "The SHA-256 of the output in UTF-8, in lower-case hex. The notice that replaces the output contains it."
        )
    ),
]


router = APIRouter(route_class=GuardedRoute)


@router.get(
    "/artifacts/{sha256}",
    summary="A spilled tool output",
    response_class=Response,
    responses={200: {"description": "The output, whole", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def get_artifact(services: AppServices, tenant: Tenant, sha256: Sha256) -> Response:
    """The tool's output, unchanged. A lone surrogate, which UTF-8 cannot encode, is written as its three bytes.

    Outputs of more than 204,800 characters are stored as artifacts, as long as their session and turn exist.
    """
    return Response(await services.artifacts.get(tenant, sha256), media_type=MEDIA_TYPE)
