"""What a session's next call brings along beside its history, as far as that can be told without the call."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tersely.domain.history.sessions import Session
from tersely.domain.messages import INSTRUCTION_ROLES, Message
from tersely.domain.models import known_window, usable_window
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig, TokenBudget, count_offers
from tersely.store.db.connection import Connection
from tersely.store.history import attributes, messages


async def fixed_tokens(
    connection: Connection,
    tenant: str,
    session: Session,
    recipe: ContextConfig,
    given: Sequence[Message] = (),
    *,
    model: str = "",
) -> int:
    """Tokens of instructions and tools: the instructions that are ``given``, else the stored ones, Tersely's own, and
    the tools of the session's last call with those that Tersely offers beside them.
    """
    raws = [message.raw for message in given]
    if not raws:
        raws = [
            row.raw
            for row in await messages.instructions(connection, tenant, session.id)
            if row.role in INSTRUCTION_ROLES
        ]
    tools = await attributes.last_tools(connection, tenant, session.id)
    fixed = await run_in_thread_if_large(
        sum(map(len, raws)) + len(tools), tokens.FixedTokens().count, model, raws, tools
    )
    if recipe.instructions:
        fixed += tokens.count_short(recipe.instructions)
    return fixed + count_offers(session.plan, recipe)


async def circumstances(
    connection: Connection,
    tenant: str,
    session: Session,
    recipe: ContextConfig,
    calibrations: Calibrations,
    *,
    model: str,
    now: datetime,
    given: Sequence[Message] = (),
    max_tokens: int | None = None,
    last_call_at: datetime | None = None,
) -> TokenBudget:
    """Return what the decision about a context looks at, for a session that no call is at hand of.

    ``max_tokens`` is the window that the context must fit into; without it that of ``model`` counts, where it is known.
    ``given`` are instructions that stand in for the stored ones.
    """
    window = max_tokens or window_of(model, calibrations)
    return TokenBudget(
        fixed_tokens=await fixed_tokens(connection, tenant, session, recipe, given, model=model),
        window=window,
        now=now,
        model_window=max_tokens or known_window(model),
        last_call_at=last_call_at,
    )


def window_of(model: str, calibrations: Calibrations) -> int | None:
    """Return the tokens that a request to ``model`` may have, in our own counts; None where they are not known."""
    known = usable_window(model, None) if model else None
    return None if known is None else int(known / calibrations.ratio(model))
