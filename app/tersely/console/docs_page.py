"""``/docs``: the API's reference, one page for each operation, with a form to try it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tersely.console.api_reference import ApiReference, read_reference
from tersely.console.pages import Pages


class DocsPages:
    """The pages of the reference. It is made when it is asked for first."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._reference: ApiReference | None = None

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/docs", self._show_all, methods=["GET"]),
            Route("/docs/{name}", self._show_operation, methods=["GET"]),
        ]

    async def _show_all(self, request: Request) -> Response:
        return self._pages.render("docs.html", reference=await self._read(request))

    async def _show_operation(self, request: Request) -> Response:
        operation = (await self._read(request)).operations.get(request.path_params["name"])
        if operation is None:
            return self._pages.render(
                "error.html", status=404, title="There is no such operation", code=404,
                text="The list of all operations is at /docs.",
            )  # fmt: skip
        return self._pages.render("operation.html", operation=operation)

    async def _read(self, request: Request) -> ApiReference:
        if self._reference is None:
            document = await asyncio.to_thread(request.app.openapi)
            self._reference = await asyncio.to_thread(read_reference, document)
        return self._reference
