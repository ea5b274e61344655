"""What a session's next call brings along beside its history, as far as that can be told without the call."""

from __future__ import annotations

from collections.abc import Sequence

from app.dialects.dialect import ToolOffer
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
    if given:
        fixed = sum(await tokens.count_messages(given, model))
    else:
        fixed = sum(row.tokens for row in await messages.instructions(connection, tenant, session.id))
    if recipe.instructions:
        fixed += tokens.count_short(recipe.instructions)
    if not session.calls:
        return fixed
    tools = await attributes.last_tools(connection, tenant, session.id)
    if tools:
        fixed += await aside(len(tools), tokens.count_tools_of, tools, tokens.encoding_for(model))
    return fixed + sum(map(count_offer, contexts.offers_in(session.plan, recipe)))


def count_offer(offer: ToolOffer) -> int:
    """Tokens of a tool of Tersely's own, as a model is told of it."""
    return tokens.count_short(f"{offer.name}{offer.description}{offer.parameters}")
