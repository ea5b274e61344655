"""Estimate the tokens that a session's next call uses besides its history."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tersely.domain.history.sessions import Session
from tersely.domain.messages import INSTRUCTION_ROLES, Message
from tersely.domain.models import known_window, usable_window
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.context_config import ContextConfig, FixedCounts, TokenBudget, count_additions
from tersely.store.db.connection import Connection
from tersely.store.history import attributes, messages


async def count_fixed(
    connection: Connection,
    tenant: str,
    session: Session,
    config: ContextConfig,
    given: Sequence[Message] = (),
    *,
    model: str = "",
) -> tuple[FixedCounts, FixedCounts]:
    """Count the tokens of instructions and tools, and those of Tersely's own among them.

    Instructions: ``given``, or else the stored ones, and Tersely's own. Tools: those of the session's last call and
    those that Tersely offers.
    """
    raws = [message.raw for message in given]
    if not raws:
        raws = [
            row.raw
            for row in await messages.instructions(connection, tenant, session.id)
            if row.role in INSTRUCTION_ROLES
        ]
    tools = await attributes.last_tools(connection, tenant, session.id)
    added = count_additions(session.plan, config)
    counter = tokens.FixedTokens()
    given_tokens = await run_in_thread_if_large(sum(map(len, raws)), counter.count_instructions, model, raws)
    tool_tokens = await run_in_thread_if_large(len(tools), counter.count_tools, model, tools)
    fixed = FixedCounts(instructions=given_tokens + added.instructions, tools=tool_tokens + added.tools)
    return fixed, added


async def budget_outside_calls(
    connection: Connection,
    tenant: str,
    session: Session,
    config: ContextConfig,
    calibrations: Calibrations,
    *,
    model: str,
    now: datetime,
    given: Sequence[Message] = (),
    max_tokens: int | None = None,
    last_call_at: datetime | None = None,
) -> TokenBudget:
    """Return the token budget of a context that is built without a call.

    ``max_tokens`` is the window that the context must fit into. Without it the window of ``model`` counts, if it is
    known. ``given`` are instructions that replace the stored ones.
    """
    window = max_tokens or window_of(model, calibrations)
    fixed, added = await count_fixed(connection, tenant, session, config, given, model=model)
    return TokenBudget(
        fixed_tokens=fixed.total,
        tool_tokens=fixed.tools,
        added=added,
        window=window,
        now=now,
        model_window=max_tokens or known_window(model),
        last_call_at=last_call_at,
    )


def window_of(model: str, calibrations: Calibrations) -> int | None:
    """Return how many tokens, counted by Tersely, a request to ``model`` may have; None if its window is unknown."""
    known = usable_window(model, None) if model else None
    return None if known is None else int(known / calibrations.ratio(model))
