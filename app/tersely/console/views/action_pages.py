"""The page of a session's actions: each shows what will change, then does it."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

from tersely.console.router import PageRequest
from tersely.console.views.base import ViewGroup, redirect, try_preview
from tersely.domain.errors import InvalidRequest, NotFound, TerselyError
from tersely.domain.history.history import IMPORTANT, MAX_PRIORITY
from tersely.domain.history.turns import write_turn_id
from tersely.service.sessions.compactions import CompactionOptions
from tersely.service.sessions.comparisons import blocks_of
from tersely.service.sessions.previews import Preview, PreviewRequest, TrialEdit
from tersely.store.history.messages import StoredMessage

PRIORITY_TEXT = (
    f"From {IMPORTANT} on a message counts as important: strategy tiered keeps its turn at a higher level. "
    "Other strategies ignore it."
)
ACTIONS = {
    "undo": ("Take back the last turn", "The last turn is hidden from every context. It stays stored."),
    "drop": ("Drop a turn", "The turn is hidden from every context. It stays stored."),
    "pin": ("Pin the message", "It stays in every context, whatever is cut, with the tool calls that belong to it."),
    "unpin": ("Unpin the message", "It is cut like every other message from now on."),
    "priority": ("Set the priority", PRIORITY_TEXT),
    "compact": (
        "Compact now",
        "A new epoch starts, and the context is cut as far as its strategy does that. Strategies compact and trim "
        "summarise everything before the last turn first.",
    ),
    "clear": ("Clear the context", "The next call starts with an empty context. History and memory stay."),
    "delete": ("Delete the session", "The session and all that belongs to it is deleted for good."),
}
MESSAGE_ACTIONS = ("pin", "unpin", "priority")


class ActionPages(ViewGroup):
    """Changes of a session by its user, each with a preview."""

    async def show_hands(self, page: PageRequest) -> Response:
        """Show the possible changes of a session; with ``act``, the effect of one."""
        session_id, act = page.get("id"), page.get("act")
        listed = await self._services.sessions.figures(page.tenant, session_id)
        turns, _ = await self._services.sessions.turns(
            page.tenant, session_id, after=max(0, listed.session.turns - 50), limit=50
        )
        live = [turn for turn in turns if turn.status == "live"]
        turn = message = None
        if act == "undo":
            turn = live[-1] if live else None
        elif act == "drop":
            turn = next((each for each in live if each.turn == page.number("turn")), None)
        elif act in MESSAGE_ACTIONS:
            message = await self._services.pins.get(page.tenant, session_id, page.number("seq", 0) or 0)
        priority = page.number("priority", None if message is None else message.priority, most=MAX_PRIORITY)
        change = self._edit(page, act, None if turn is None else turn.turn, priority)
        before = after = compaction = None
        trouble = ""
        if act in ("compact", "clear") or change is not None:
            before, trouble = await try_preview(self._services, page.tenant, session_id, PreviewRequest())
        if act in ("compact", "clear"):
            try:
                kind: Literal["compact", "clear"] = "compact" if act == "compact" else "clear"
                compaction = await self._services.compactions.preview(page.tenant, session_id, kind)
            except TerselyError as error:
                trouble = trouble or error.detail
        if change is not None and before is not None:
            after, trouble = await self._preview_after(page.tenant, session_id, change)
        return self._render(
            page, "hands.html", "sessions", tab="hands", listed=listed, turns=list(reversed(turns)), act=act,
            actions=ACTIONS, turn=turn, before=before, after=after, turn_id=write_turn_id, message=message,
            priority=priority, trouble=trouble, call=page.get("call"), changes=_changes(before, after),
            text="" if message is None else _first_words(message), compaction=compaction,
            price=self._services.prices.of(listed.models[-1] if listed.models else ""),
            summary_price=self._services.prices.of(compaction.model) if compaction is not None else None,
        )  # fmt: skip

    def _edit(self, page: PageRequest, act: str, turn: int | None, priority: int | None) -> TrialEdit | None:
        """Return what an action does, to be tried out; None for actions that cannot be."""
        of, tenant, session_id = self._services, page.tenant, page.get("id")
        seq = page.number("seq", 0) or 0
        if act in ("undo", "drop") and turn is not None:
            status: Literal["undone", "dropped"] = "undone" if act == "undo" else "dropped"
            return lambda connection: of.sessions.hide_within(connection, tenant, session_id, turn, status)
        if act in ("pin", "unpin"):
            return lambda connection: of.pins.pin_within(connection, tenant, session_id, seq, pinned=act == "pin")
        if act == "priority":
            return lambda connection: of.pins.set_priority_within(connection, tenant, session_id, seq, priority or 0)
        return None

    async def _preview_after(self, tenant: str, session_id: str, change: TrialEdit) -> tuple[Preview | None, str]:
        try:
            return await self._services.previews.build_after(tenant, session_id, change), ""
        except NotFound:
            raise
        except TerselyError as error:
            return None, error.detail

    async def act(self, page: PageRequest) -> Response:
        """Do what was confirmed."""
        session_id, act = page.get("id"), page.get("act")
        of, tenant = self._services, page.tenant
        match act:
            case "undo":
                await of.sessions.undo(tenant, session_id, expected=page.number("turn"))
            case "drop":
                await of.sessions.drop(tenant, session_id, page.number("turn", 0, most=2**31 - 1) or 0)
            case "pin" | "unpin":
                seq = page.number("seq", 0) or 0
                await of.pins.pin(tenant, session_id, seq, pinned=act == "pin")
                return redirect(page.link("session", id=session_id, call=page.get("call"), seq=seq))
            case "priority":
                seq = page.number("seq", 0) or 0
                await of.pins.set_priority(tenant, session_id, seq, page.number("priority", 50, most=MAX_PRIORITY) or 0)
                return redirect(page.link("session", id=session_id, call=page.get("call"), seq=seq))
            case "compact":
                await of.compactions.compact(tenant, session_id, CompactionOptions())
            case "clear":
                await of.compactions.clear(tenant, session_id, CompactionOptions())
            case "delete":
                await of.sessions.delete(tenant, session_id)
                return redirect(page.link("sessions"))
            case _:
                raise InvalidRequest("there is no such action", field="act")
        return redirect(page.link("session/hands", id=session_id, done=act))


def _changes(before: Preview | None, after: Preview | None) -> list[tuple[int, str, str]]:
    """Return the turns that one context shows otherwise than the other: (turn, now, then)."""
    if before is None or after is None:
        return []
    now = {turn.turn: turn.kept for turn in before.turns}
    then = {turn.turn: turn.kept for turn in after.turns}
    return [
        (turn, now.get(turn, "left_out"), then.get(turn, "left_out"))
        for turn in sorted({*now, *then})
        if now.get(turn, "left_out") != then.get(turn, "left_out")
    ]


def _first_words(message: StoredMessage) -> str:
    """Return the beginning of a message's text."""
    blocks = blocks_of(message.raw, message.dialect, message.role, 400)
    return " ".join(block.text for block in blocks if block.kind != "injected")[:160]
