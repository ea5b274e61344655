"""``/docs``: Swagger UI from the package, so that no other host is asked for anything."""

from __future__ import annotations

from starlette.routing import Route

from tersely.console.pages import Pages


def docs_route(pages: Pages) -> Route:
    """The route of the page."""
    return Route("/docs", pages.render("docs.html"), methods=["GET"])
