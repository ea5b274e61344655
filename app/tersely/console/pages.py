"""Pages of the console: templates, the headers that every page carries, and how figures are written."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse

from tersely.console.api_reference import prose
from tersely.console.epoch_reasons import explain_epoch
from tersely.service.sessions.comparisons import readable

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MINUTE, HOUR, DAY = 60, 3600, 86_400


def number(value: float | None) -> str:
    """A count with thin separators; a dash where there is none."""
    return "–" if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """A count in few characters: 940, 12.3k, 4.1M."""
    if value is None:
        return "–"
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"


def usd(value: float | None) -> str:
    """Dollars, with as many digits as small sums need."""
    if value is None:
        return "–"
    sign = "−" if value < 0 else ""
    value = abs(value)
    digits = 2 if value >= 1 or value == 0 else 4 if value >= 0.001 else 6
    return f"{sign}${value:,.{digits}f}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """A time span: milliseconds below a second."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def clock_time(at: datetime | None) -> str:
    """A time in UTC."""
    return "–" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def iso(at: datetime) -> str:
    """A time for machines."""
    return at.astimezone(UTC).isoformat()


def ago(at: datetime | None, now: datetime) -> str:
    """Return the age of a time in words."""
    if at is None:
        return "never"
    seconds = max(0, int((now - at).total_seconds()))
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def typed(value: object) -> Markup:
    """A value of a form's field, as it was typed: it comes back when the form is sent."""
    return escape(value)


def _shown(value: object) -> object:
    """Text with a picture for each control character, wherever a page shows it."""
    return readable(value) if type(value) is str else value


def link(path: str, **query: object) -> str:
    """An address of the console; members without a value are left out."""
    given = {name: value for name, value in query.items() if value not in {None, ""}}
    return f"/console/{path}" + (f"?{urlencode(given)}" if given else "")


class Pages:
    """Renders the templates of the console."""

    def __init__(self, *, version: str) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown,
        )
        self._environment.globals.update(link=link, version=version, ago=ago)
        self._environment.filters.update(
            number=number,
            short=short,
            usd=usd,
            share=share,
            clock_time=clock_time,
            iso=iso,
            typed=typed,
            epoch_reason=explain_epoch,
            duration=duration,
            prose=prose,
        )

    def render(self, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """A page. Raises `jinja2.UndefinedError` for a value that a template needs and does not get."""
        body = self._environment.get_template(template).render(**values)
        return HTMLResponse(body, status_code=status, headers={**HEADERS, "cache-control": "no-store"})
