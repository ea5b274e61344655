"""The page that tries other settings on a session."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from tersely.console.router import PageRequest
from tersely.console.strategy_form import POLICIES, parameter_fields, write_policy, write_strategy
from tersely.console.views.base import ViewGroup, redirect, try_preview
from tersely.domain.errors import InvalidRequest
from tersely.service.sessions.previews import PreviewRequest
from tersely.service.sessions.sessions import SessionChange
from tersely.strategies.presets import STRATEGIES


class TrialPages(ViewGroup):
    """The next context under other settings, beside the present one."""

    async def show_try(self, page: PageRequest) -> Response:
        """Show the next context under other settings beside the current one."""
        session_id = page.get("id")
        listed = await self._services.sessions.figures(page.tenant, session_id)
        name, policy = page.get("name"), page.get("policy")
        parameters = parameter_fields(name, page.get)
        strategy = write_strategy(name, parameters) if name else page.get("strategy").strip()
        epoch = write_policy(policy, page.get) if policy else page.get("epoch").strip()
        present, trouble = await try_preview(self._services, page.tenant, session_id, PreviewRequest())
        other, other_trouble = None, ""
        if strategy or epoch:
            options = PreviewRequest(strategy=strategy or None, epoch=epoch or None)
            other, other_trouble = await try_preview(self._services, page.tenant, session_id, options)
        model = listed.models[-1] if listed.models else ""
        return self._render(
            page, "try.html", "sessions", tab="try", listed=listed, present=present, trouble=trouble, other=other,
            other_trouble=other_trouble, strategy=strategy, epoch=epoch, strategies=STRATEGIES,
            price=self._services.prices.of(model), model=model, name=name, policy=policy, policies=POLICIES,
            parameters=parameters, marks={each: page.get(each) for each in ("high", "low", "stride")},
        )  # fmt: skip

    async def set_strategy(self, page: PageRequest) -> Response:
        """Make settings the session's own."""
        session_id = page.get("id")
        given: dict[str, Any] = {
            name: _setting(page.get(name)) for name in ("strategy", "epoch") if page.get(name).strip()
        }
        await self._services.sessions.change(page.tenant, session_id, SessionChange(**given))
        return redirect(page.link("session/try", id=session_id))


def _setting(text: str) -> Any:
    """A setting as it was typed: a name, or JSON. Raises `InvalidRequest`."""
    text = text.strip()
    if not text.startswith("{"):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"strategy is not valid JSON: {error}", field="strategy") from None
