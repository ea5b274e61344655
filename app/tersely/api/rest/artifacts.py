"""``/api/artifacts/{sha256}``: an oversized tool output, whole, and its deletion."""

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


@router.delete("/artifacts/{sha256}", summary="Delete a spilled tool output", status_code=204)
async def delete_artifact(services: AppServices, tenant: Tenant, sha256: Sha256) -> Response:
    """Delete the output for good, in every session of the tenant that has it.

    Its messages stay, with a notice in its place. What was made of them is deleted: log lines, summaries, memory,
    recorded requests. A client that still holds the output sends it again with its history; then it goes to the model,
    but is not stored as a message again.
    """
    await services.artifact_removal.delete(tenant, sha256)
    return Response(status_code=204)
