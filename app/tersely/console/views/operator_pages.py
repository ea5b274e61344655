"""The operator's page: tenants, keys, limits, and how the service does."""

from __future__ import annotations

from starlette.responses import Response

from tersely.console.pages import link
from tersely.console.router import PageRequest
from tersely.console.views.base import PAGE, ViewGroup, redirect
from tersely.domain.errors import InvalidRequest, StoreUnavailable
from tersely.domain.limits import MAX_DAYS, Limits
from tersely.service.common.replay_tenants import is_replay_tenant
from tersely.service.limits.tenants import LimitedTenant

LIMIT_TEXTS = {
    "requests_per_minute": "requests per minute",
    "concurrent": "concurrent calls",
    "tokens_per_day": "tokens per day",
    "money_per_month": "USD per month",
    "stored_bytes": "stored bytes",
}


class OperatorPages(ViewGroup):
    """Tenants with their keys and limits, and the health of the service."""

    async def show_operator(self, page: PageRequest, new_key: str = "") -> Response:
        """Tenants, keys, limits and use, and how the service does."""
        figures = await self._services.operations.figures()
        tenants: list[LimitedTenant] = []
        following, trouble = None, ""
        try:
            tenants, following = await self._services.tenants.page(after=page.get("after"), limit=PAGE)
        except StoreUnavailable:
            trouble = "The database is away: tenants and keys cannot be shown."
        return self._render(
            page, "operator.html", "operator", figures=figures,
            tenants=[each for each in tenants if not is_replay_tenant(each.name)], following=following,
            trouble=trouble, new_key=new_key, limit_texts=LIMIT_TEXTS, edited=page.get("edit"),
        )  # fmt: skip

    async def make_tenant(self, page: PageRequest) -> Response:
        """Make a tenant without keys."""
        await self._services.tenants.create(page.get("tenant").strip())
        return redirect(link("operator"))

    async def make_key(self, page: PageRequest) -> Response:
        """Make a key; it is shown this once."""
        days = page.number("days", most=MAX_DAYS)
        text, _ = await self._services.tenants.create_key(
            page.get("tenant").strip(), page.get("label").strip(), scope=page.get("scope") or None, days=days or None
        )
        return await self.show_operator(page, text)

    async def revoke_key(self, page: PageRequest) -> Response:
        """Revoke a key."""
        await self._services.tenants.revoke_key(page.get("key"))
        return redirect(link("operator"))

    async def set_limits(self, page: PageRequest) -> Response:
        """Set the limits of a tenant."""
        given = {name: _limit(name, page.get(name)) for name in LIMIT_TEXTS}
        await self._services.tenants.set_limits(page.get("tenant"), Limits(**given))  # type: ignore[arg-type]
        return redirect(link("operator"))


def _limit(name: str, text: str) -> float | None:
    """A limit from a form; None for none. Raises `InvalidRequest`."""
    text = text.strip()
    if not text:
        return None
    try:
        value = float(text) if name == "money_per_month" else int(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be a number, or empty", field=name) from None
    if not 0 <= value <= 2**53:
        raise InvalidRequest(f"{name} must be a number from 0 on", field=name)
    return value
