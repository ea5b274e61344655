"""What a session's next call brings along beside its history, as far as that can be told without the call."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.messages import Message
from app.domain.sessions import Session
from app.service import contexts, tokens
from app.service.aside import aside
from app.service.contexts import Recipe
from app.store import attributes, messages
from app.store.connection import Connection


async def fixed_tokens(
    connection: Connection,
    tenant: str,
    session: Session,
    recipe: Recipe,
    given: Sequence[Message] = (),
    *,
    model: str = "",
) -> int:
    """Tokens of instructions and tools: the instructions that are ``given``, else the stored ones, Tersely's own, and
    the tools of the session's last call with those that Tersely offers beside them.
    """
    raws = [message.raw for message in given]
    if not raws:
        raws = [row.raw for row in await messages.instructions(connection, tenant, session.id)]
    tools = await attributes.last_tools(connection, tenant, session.id)
    fixed = await aside(sum(map(len, raws)) + len(tools), tokens.FixedTokens().count, model, raws, tools)
    if recipe.instructions:
        fixed += tokens.count_short(recipe.instructions)
    return fixed + contexts.count_offers(session.plan, recipe)
