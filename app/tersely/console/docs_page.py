"""``/docs``: Swagger UI from the package, so that no other host is asked for anything."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tersely.console.pages import Pages


def docs_route(pages: Pages) -> Route:
    """The route of the page."""

    async def show(request: Request) -> Response:
        del request
        return pages.render("docs.html")

    return Route("/docs", show, methods=["GET"])
