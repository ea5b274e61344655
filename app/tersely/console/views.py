"""The views of the console. Each reads through the service and renders one template."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from tersely.console.cache_causes import find_breaks
from tersely.console.pages import HEADERS, Pages, link
from tersely.console.router import Seen, Upload, View
from tersely.console.strategy_form import POLICIES, parameter_fields, write_policy, write_strategy
from tersely.console.strip import MOST, draw
from tersely.console.tool_list import list_tools
from tersely.domain.errors import InvalidRequest, NotFound, StoreUnavailable, TerselyError
from tersely.domain.history.history import IMPORTANT, MAX_PRIORITY
from tersely.domain.history.turns import write_turn_id
from tersely.domain.limits import Limits
from tersely.service.common.call_board import CallBoard, Note, RunningCall
from tersely.service.common.operations import Operations
from tersely.service.common.replay_tenants import is_replay_tenant, replay_tenant
from tersely.service.limits.tenants import LimitedTenant, Tenants
from tersely.service.memos.memos import Memos
from tersely.service.money.prices import Prices
from tersely.service.money.savings import Savings
from tersely.service.replays.replays import MAX_BYTES, MAX_SECONDS, ReplayOptions, Replays
from tersely.service.search.tenant_search import Mode, TenantSearch
from tersely.service.sessions.activity import Activity, Happening
from tersely.service.sessions.artifact_removal import ArtifactRemoval
from tersely.service.sessions.artifacts import Artifacts
from tersely.service.sessions.calls import Calls, text_of_instructions
from tersely.service.sessions.compactions import CompactionOptions, Compactions
from tersely.service.sessions.comparisons import MAX_CHARS, Comparisons, blocks_of, readable
from tersely.service.sessions.notes import Notes
from tersely.service.sessions.pins import Pins
from tersely.service.sessions.previews import Edit, Preview, PreviewRequest, Previews
from tersely.service.sessions.sessions import Change, Sessions
from tersely.service.summaries.daily_memory import DailyMemory
from tersely.store.history.messages import StoredMessage
from tersely.store.history.session_lists import Narrowing, Sort
from tersely.store.ops.activity import RunningCall as StoredCall
from tersely.store.ops.calls import CallRow, GroupBy
from tersely.strategies.presets import STRATEGIES

ROWS = 60
"""Rows of a session that a page holds; others come when they are scrolled to."""
PAGE = 50
LIVE = timedelta(seconds=60)
PERIODS = {"1": "Today", "7": "7 days", "30": "30 days", "365": "A year"}
SORTS = {"last_call": "Last call", "saved": "Tokens saved", "tokens": "Tokens stored", "created": "Newest"}
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
DEMO = Path(__file__).parents[1] / "data" / "demo_transcript.json"
DEMO_NAME = "demo_transcript.json"
DEMO_EPOCH = '{"high": 12000, "low": 5000}'
REPLAY_POLICIES = {
    "": "as configured",
    DEMO_EPOCH: "small: cut at 12,000 tokens down to 5,000",
    '{"high": 32000, "low": 12000}': "default: cut at 32,000 tokens down to 12,000",
    "every_request": "a new epoch at every call",
}
LIMIT_TEXTS = {
    "requests_per_minute": "requests per minute",
    "concurrent": "concurrent calls",
    "tokens_per_day": "tokens per day",
    "money_per_month": "USD per month",
    "stored_bytes": "stored bytes",
}
MESSAGE_ACTIONS = ("pin", "unpin", "priority")
MAX_ARTIFACT = 500_000
"""Characters of an artifact that a page shows."""
PATIENCE = 8.0
"""Seconds that a page waits for a replay; a longer one goes on behind the page that shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The use cases that the views read and change. ``lifetime``: seconds that a provider's cache stays warm."""

    sessions: Sessions
    calls: Calls
    comparisons: Comparisons
    activity: Activity
    board: CallBoard
    search: TenantSearch
    savings: Savings
    prices: Prices
    previews: Previews
    compactions: Compactions
    pins: Pins
    notes: Notes
    memos: Memos
    memories: DailyMemory
    tenants: Tenants
    operations: Operations
    artifacts: Artifacts
    artifact_removal: ArtifactRemoval
    replays: Replays
    lifetime: float
    is_guarded: bool


class Views:
    """All views."""

    def __init__(self, pages: Pages, sources: Sources) -> None:
        self._pages = pages
        self._of = sources

    def views(self) -> dict[str, View]:
        """Path under ``/console`` -> view."""
        return {
            "sessions": self.list_sessions,
            "session": self.show_session,
            "session/rows": self.show_rows,
            "session/text": self.show_text,
            "replay/session/text": self.show_text,
            "session/tools": self.show_tools,
            "replay/session/tools": self.show_tools,
            "session/artifact": self.show_artifact,
            "sessions/children": self.show_children,
            "session/cache": self.show_cache,
            "session/try": self.show_try,
            "session/memory": self.show_session_memory,
            "session/hands": self.show_hands,
            "savings": self.show_savings,
            "live": self.show_live,
            "live/events": self.stream_live,
            "search": self.show_search,
            "memory": self.show_memory,
            "operator": self.show_operator,
            "replay": self.show_replays,
            "replay/session": self.show_session,
            "replay/session/rows": self.show_rows,
            "replay/session/cache": self.show_cache,
            "replay/session/savings": self.show_session_savings,
            "replay/session/try": self.show_try,
            "session/savings": self.show_session_savings,
        }

    def changes(self) -> dict[str, View]:
        """Path under ``/console`` -> what changes something."""
        return {
            "session/strategy": self.set_strategy,
            "session/act": self.act,
            "session/artifact/delete": self.delete_artifact,
            "session/state": self.put_state,
            "session/scratchpad": self.put_scratchpad,
            "memory/memo": self.delete_memo,
            "memory/new": self.save_memo,
            "memory/edit": self.edit_memo,
            "memory/day": self.delete_day,
            "operator/key": self.make_key,
            "operator/revoke": self.revoke_key,
            "operator/limits": self.set_limits,
            "operator/tenant": self.make_tenant,
            "replay/demo": self.play_demo,
            "replay/delete": self.delete_replay,
        }

    def uploads(self) -> dict[str, tuple[Upload, int]]:
        """Map paths under ``/console`` to upload handlers, with the maximum of bytes of each."""
        return {"replay/play": (self.play_file, MAX_BYTES)}

    def _render(self, seen: Seen, template: str, view: str, **values: Any) -> Response:
        tenant = seen.visit.tenant
        return self._pages.render(
            template, view=view, token=seen.visit.token, now=seen.now, tenant=tenant, link=seen.link,
            is_guarded=self._of.is_guarded and bool(tenant), is_replay=seen.is_replay, replay_seconds=MAX_SECONDS,
            **values,
        )  # fmt: skip

    # Sessions

    async def list_sessions(self, seen: Seen) -> Response:
        """Sessions with their figures; filters, order and place are in the address."""
        sort = cast("Sort", seen.get("sort") if seen.get("sort") in SORTS else "last_call")
        parent = seen.get("parent") or None
        narrowing = Narrowing(
            query=seen.get("query") or None,
            client=seen.get("client") or None,
            model=seen.get("model") or None,
            strategy=seen.get("strategy") or None,
            since=_since(seen.get("days"), seen.now),
            parent=parent,
            tops=parent is None and not seen.get("query"),
        )
        found, following = await self._of.sessions.page(
            seen.tenant, narrowing, sort=sort, after=seen.get("after") or None, limit=PAGE
        )
        children = await self._of.sessions.children(seen.tenant, [each.session.id for each in found])
        given = {name: seen.get(name) for name in ("query", "client", "model", "strategy", "days", "parent")}
        shadows = await self._of.savings.shadows_of(seen.tenant, [each.session.id for each in found])
        return self._render(
            seen, "sessions.html", "sessions", listed=found, following=following, sort=sort, sorts=SORTS, given=given,
            children=children, strategies=STRATEGIES, periods=PERIODS, live=LIVE, shadows=shadows,
            is_narrowed=any(given.values()),
        )  # fmt: skip

    # A session

    async def show_session(self, seen: Seen) -> Response:
        """Show the client's messages beside the messages that one call sent to the model."""
        session_id = seen.get("id")
        listed = await self._of.sessions.figures(seen.tenant, session_id)
        last = await self._of.calls.last(seen.tenant, session_id, limit=1)
        if not last:
            return self._render(
                seen, "session.html", "sessions", tab="context", listed=listed, calls=[], current=None, replay={}
            )
        newest = last[-1].row.number
        number = min(max(1, seen.number("call", newest) or newest), newest)
        end = min(newest, max(number + MOST // 2, MOST))
        calls = await self._of.calls.last(seen.tenant, session_id, limit=MOST, before=end + 1)
        epochs, _ = await self._of.calls.epochs(seen.tenant, session_id, after=0, limit=1000)
        compared = await self._of.comparisons.rows(
            seen.tenant, session_id, number, start=0, limit=ROWS, seq=seen.number("seq")
        )
        return self._render(
            seen, "session.html", "sessions", tab="context", listed=listed, calls=calls, newest=newest,
            strip=draw(calls, epochs, number), current=compared.context.call, compared=compared, number=number,
            gaps_before=_gaps(0, compared.start), seq=seen.number("seq"),
            gaps_after=_gaps(compared.start + len(compared.rows), compared.total),
            link_rows=self._link_rows(seen, number), reason=compared.context.reason,
            instructions=readable(text_of_instructions(compared.context.instructions or b"null"))[:MAX_ARTIFACT],
            replay=_replay_of(listed.session.metadata) if seen.is_replay else {},
        )  # fmt: skip

    def _link_rows(self, seen: Seen, number: int) -> Callable[[int, int], str]:
        def write(start: int, count: int) -> str:
            return seen.link("session/rows", id=seen.get("id"), call=number, start=start, count=count)

        return write

    async def show_rows(self, seen: Seen) -> Response:
        """Further rows, as they are scrolled to."""
        number, start = seen.number("call", 1) or 1, seen.number("start", 0) or 0
        count = min(seen.number("count", ROWS) or ROWS, ROWS)
        compared = await self._of.comparisons.rows(seen.tenant, seen.get("id"), number, start=start, limit=count)
        listed = await self._of.sessions.figures(seen.tenant, seen.get("id"))
        return self._render(seen, "rows.html", "sessions", compared=compared, listed=listed, number=number, seq=None)

    async def show_text(self, seen: Seen) -> Response:
        """The whole text of a part that a row shows the beginning of."""
        text = await self._of.comparisons.whole_text(
            seen.tenant,
            seen.get("id"),
            seen.number("call", 1) or 1,
            seq=seen.number("seq"),
            index=seen.number("index"),
            part=seen.number("part", 0) or 0,
        )
        return self._pages.render("text.html", text=text[MAX_CHARS:])

    async def show_tools(self, seen: Seen) -> Response:
        """The tool definitions that a call sent: for a page that asks by script the list alone."""
        number = seen.number("call", 1) or 1
        tools = await self._of.calls.tools(seen.tenant, seen.get("id"), number)
        definitions = await asyncio.to_thread(list_tools, tools)
        if "hx-request" in seen.request.headers:
            return self._pages.render("tools.html", definitions=definitions, reason=tools.reason)
        listed = await self._of.sessions.figures(seen.tenant, seen.get("id"))
        return self._render(
            seen, "tools_page.html", "sessions", listed=listed, number=number, definitions=definitions,
            reason=tools.reason,
        )  # fmt: skip

    async def show_artifact(self, seen: Seen) -> Response:
        """A tool output that was kept apart."""
        content = await self._of.artifacts.get(seen.tenant, seen.get("sha"))
        text = readable(content.decode("utf-8", "replace"))
        return self._render(
            seen, "artifact.html", "sessions", sha=seen.get("sha"), session_id=seen.get("id"), size=len(content),
            text=text[:MAX_ARTIFACT], is_cut=len(text) > MAX_ARTIFACT, act=seen.get("act"),
        )  # fmt: skip

    async def delete_artifact(self, seen: Seen) -> Response:
        """Delete a tool output for good."""
        await self._of.artifact_removal.delete(seen.tenant, seen.get("sha"))
        return _go(seen.link("session/memory", id=seen.get("id")))

    async def show_children(self, seen: Seen) -> Response:
        """The subagents of a session, as rows under it."""
        parent = seen.get("parent")
        found, _ = await self._of.sessions.page(
            seen.tenant, Narrowing(parent=parent), sort="created", after=None, limit=PAGE
        )
        children = await self._of.sessions.children(seen.tenant, [each.session.id for each in found])
        return self._render(seen, "children.html", "sessions", listed=found, children=children, live=LIVE, under=parent)

    async def show_cache(self, seen: Seen) -> Response:
        """Each change of the cached beginning, with its cause and its cost."""
        session_id = seen.get("id")
        listed = await self._of.sessions.figures(seen.tenant, session_id)
        calls = await self._of.calls.last(seen.tenant, session_id, limit=1000)
        epochs, _ = await self._of.calls.epochs(seen.tenant, session_id, after=0, limit=1000)
        breaks = find_breaks(calls, epochs, lifetime=self._of.lifetime, price=self._of.prices.of)
        known = [each.cost for each in breaks if each.cost is not None]
        return self._render(
            seen, "cache.html", "sessions", tab="cache", listed=listed, calls=calls, breaks=list(reversed(breaks)),
            cost=sum(known) if known else None, again=sum(each.again or 0 for each in breaks),
        )  # fmt: skip

    # Trying another strategy

    async def show_try(self, seen: Seen) -> Response:
        """Show the next context under other settings beside the current one."""
        session_id = seen.get("id")
        listed = await self._of.sessions.figures(seen.tenant, session_id)
        name, policy = seen.get("name"), seen.get("policy")
        parameters = parameter_fields(name, seen.get)
        strategy = write_strategy(name, parameters) if name else seen.get("strategy").strip()
        epoch = write_policy(policy, seen.get) if policy else seen.get("epoch").strip()
        present, trouble = await self._preview(seen.tenant, session_id, PreviewRequest())
        other, other_trouble = None, ""
        if strategy or epoch:
            wish = PreviewRequest(strategy=strategy or None, epoch=epoch or None)
            other, other_trouble = await self._preview(seen.tenant, session_id, wish)
        model = listed.models[-1] if listed.models else ""
        return self._render(
            seen, "try.html", "sessions", tab="try", listed=listed, present=present, trouble=trouble, other=other,
            other_trouble=other_trouble, strategy=strategy, epoch=epoch, strategies=STRATEGIES,
            price=self._of.prices.of(model), model=model, name=name, policy=policy, policies=POLICIES,
            parameters=parameters, marks={each: seen.get(each) for each in ("high", "low", "stride")},
        )  # fmt: skip

    async def _preview(self, tenant: str, session_id: str, wish: PreviewRequest) -> tuple[Preview | None, str]:
        try:
            return await self._of.previews.build(tenant, session_id, wish), ""
        except NotFound:
            raise
        except TerselyError as error:
            return None, error.detail

    async def set_strategy(self, seen: Seen) -> Response:
        """Make settings the session's own."""
        session_id = seen.get("id")
        given: dict[str, Any] = {
            name: _setting(seen.get(name)) for name in ("strategy", "epoch") if seen.get(name).strip()
        }
        await self._of.sessions.change(seen.tenant, session_id, Change(**given))
        return _go(seen.link("session/try", id=session_id))

    # Hands

    async def show_hands(self, seen: Seen) -> Response:
        """Show the possible changes of a session; with ``act``, the effect of one."""
        session_id, act = seen.get("id"), seen.get("act")
        listed = await self._of.sessions.figures(seen.tenant, session_id)
        turns, _ = await self._of.sessions.turns(
            seen.tenant, session_id, after=max(0, listed.session.turns - 50), limit=50
        )
        live = [turn for turn in turns if turn.status == "live"]
        turn = message = None
        if act == "undo":
            turn = live[-1] if live else None
        elif act == "drop":
            turn = next((each for each in live if each.turn == seen.number("turn")), None)
        elif act in MESSAGE_ACTIONS:
            message = await self._of.pins.get(seen.tenant, session_id, seen.number("seq", 0) or 0)
        priority = seen.number("priority", None if message is None else message.priority, most=MAX_PRIORITY)
        change = self._edit(seen, act, None if turn is None else turn.turn, priority)
        before = after = compaction = None
        trouble = ""
        if act in ("compact", "clear") or change is not None:
            before, trouble = await self._preview(seen.tenant, session_id, PreviewRequest())
        if act in ("compact", "clear"):
            try:
                kind: Literal["compact", "clear"] = "compact" if act == "compact" else "clear"
                compaction = await self._of.compactions.preview(seen.tenant, session_id, kind)
            except TerselyError as error:
                trouble = trouble or error.detail
        if change is not None and before is not None:
            after, trouble = await self._preview_after(seen.tenant, session_id, change)
        return self._render(
            seen, "hands.html", "sessions", tab="hands", listed=listed, turns=list(reversed(turns)), act=act,
            actions=ACTIONS, turn=turn, before=before, after=after, turn_id=write_turn_id, message=message,
            priority=priority, trouble=trouble, call=seen.get("call"), changes=_changes(before, after),
            text="" if message is None else _first_words(message), compaction=compaction,
            price=self._of.prices.of(listed.models[-1] if listed.models else ""),
            summary_price=self._of.prices.of(compaction.model) if compaction is not None else None,
        )  # fmt: skip

    def _edit(self, seen: Seen, act: str, turn: int | None, priority: int | None) -> Edit | None:
        """Return what an action does, to be tried out; None for actions that cannot be."""
        of, tenant, session_id = self._of, seen.tenant, seen.get("id")
        seq = seen.number("seq", 0) or 0
        if act in ("undo", "drop") and turn is not None:
            status: Literal["undone", "dropped"] = "undone" if act == "undo" else "dropped"
            return lambda connection: of.sessions.hide_within(connection, tenant, session_id, turn, status)
        if act in ("pin", "unpin"):
            return lambda connection: of.pins.pin_within(connection, tenant, session_id, seq, pinned=act == "pin")
        if act == "priority":
            return lambda connection: of.pins.set_priority_within(connection, tenant, session_id, seq, priority or 0)
        return None

    async def _preview_after(self, tenant: str, session_id: str, change: Edit) -> tuple[Preview | None, str]:
        try:
            return await self._of.previews.build_after(tenant, session_id, change), ""
        except NotFound:
            raise
        except TerselyError as error:
            return None, error.detail

    async def act(self, seen: Seen) -> Response:
        """Do what was confirmed."""
        session_id, act = seen.get("id"), seen.get("act")
        of, tenant = self._of, seen.tenant
        match act:
            case "undo":
                await of.sessions.undo(tenant, session_id)
            case "drop":
                await of.sessions.drop(tenant, session_id, seen.number("turn", 0, most=2**31 - 1) or 0)
            case "pin" | "unpin":
                seq = seen.number("seq", 0) or 0
                await of.pins.pin(tenant, session_id, seq, pinned=act == "pin")
                return _go(seen.link("session", id=session_id, call=seen.get("call"), seq=seq))
            case "priority":
                seq = seen.number("seq", 0) or 0
                await of.pins.set_priority(tenant, session_id, seq, seen.number("priority", 50, most=MAX_PRIORITY) or 0)
                return _go(seen.link("session", id=session_id, call=seen.get("call"), seq=seq))
            case "compact":
                await of.compactions.compact(tenant, session_id, CompactionOptions())
            case "clear":
                await of.compactions.clear(tenant, session_id, CompactionOptions())
            case "delete":
                await of.sessions.delete(tenant, session_id)
                return _go(seen.link("sessions"))
            case _:
                raise InvalidRequest("there is no such action", field="act")
        return _go(seen.link("session/hands", id=session_id, done=act))

    # Memory

    async def show_session_memory(self, seen: Seen) -> Response:
        """The state block with its history, and the scratchpad."""
        session_id = seen.get("id")
        listed = await self._of.sessions.figures(seen.tenant, session_id)
        state = await self._of.notes.state(seen.tenant, session_id)
        artifacts = await self._of.artifacts.of_session(seen.tenant, session_id, limit=100)
        history, _ = await self._of.notes.state_history(seen.tenant, session_id, after=None, limit=200)
        scratchpad = await self._of.notes.scratchpad(seen.tenant, session_id)
        texts = ["", *(past.state.text for past in history)]
        changes = [(past, _difference(before, past.state.text)) for before, past in zip(texts, history, strict=False)]
        return self._render(
            seen, "session_memory.html", "sessions", tab="memory", listed=listed, state=state,
            changes=list(reversed(changes)), scratchpad=scratchpad, artifacts=artifacts,
        )  # fmt: skip

    async def put_state(self, seen: Seen) -> Response:
        """Write the state block."""
        await self._of.notes.put_state(seen.tenant, seen.get("id"), seen.get("text").replace("\r\n", "\n"))
        return _go(seen.link("session/memory", id=seen.get("id")))

    async def put_scratchpad(self, seen: Seen) -> Response:
        """Write the scratchpad."""
        await self._of.notes.put_scratchpad(seen.tenant, seen.get("id"), seen.get("text").replace("\r\n", "\n"))
        return _go(seen.link("session/memory", id=seen.get("id")))

    async def show_memory(self, seen: Seen) -> Response:
        """Memos and the daily memory of the tenant."""
        memos, _ = await self._of.memos.page(seen.tenant, after=None, tags=None, limit=100)
        entries, _ = await self._of.memories.page(seen.tenant, day=None, session_id=None, after=None, limit=50)
        return self._render(seen, "memory.html", "memory", memos=memos, entries=entries)

    async def save_memo(self, seen: Seen) -> Response:
        """Save a new memo."""
        await self._of.memos.save(seen.tenant, content=_lines(seen.get("content")), tags=_tags(seen), session_id=None)
        return _go(seen.link("memory"))

    async def edit_memo(self, seen: Seen) -> Response:
        """Change a memo."""
        content = _lines(seen.get("content"))
        await self._of.memos.change(seen.tenant, seen.get("memo"), content=content, tags=_tags(seen))
        return _go(seen.link("memory"))

    async def delete_memo(self, seen: Seen) -> Response:
        """Delete a memo."""
        await self._of.memos.delete(seen.tenant, seen.get("memo"))
        return _go(seen.link("memory"))

    async def delete_day(self, seen: Seen) -> Response:
        """Delete the memory entries of one day of a session."""
        try:
            day = date.fromisoformat(seen.get("day"))
        except ValueError:
            raise InvalidRequest("day must be a date", field="day") from None
        await self._of.memories.forget(seen.tenant, day=day, session_id=seen.get("session") or None)
        return _go(seen.link("memory"))

    # The operator

    async def show_operator(self, seen: Seen, new_key: str = "") -> Response:
        """Tenants, keys, limits and use, and how the service does."""
        figures = await self._of.operations.figures()
        tenants: list[LimitedTenant] = []
        following, trouble = None, ""
        try:
            tenants, following = await self._of.tenants.page(after=seen.get("after"), limit=PAGE)
        except StoreUnavailable:
            trouble = "The database is away: tenants and keys cannot be shown."
        return self._render(
            seen, "operator.html", "operator", figures=figures,
            tenants=[each for each in tenants if not is_replay_tenant(each.name)], following=following,
            trouble=trouble, new_key=new_key, limit_texts=LIMIT_TEXTS, edited=seen.get("edit"),
        )  # fmt: skip

    async def make_tenant(self, seen: Seen) -> Response:
        """Make a tenant without keys."""
        await self._of.tenants.create(seen.get("tenant").strip())
        return _go(link("operator"))

    async def make_key(self, seen: Seen) -> Response:
        """Make a key; it is shown this once."""
        days = seen.number("days", most=36_500)
        text, _ = await self._of.tenants.create_key(
            seen.get("tenant").strip(), seen.get("label").strip(), scope=seen.get("scope") or None, days=days or None
        )
        return await self.show_operator(seen, text)

    async def revoke_key(self, seen: Seen) -> Response:
        """Revoke a key."""
        await self._of.tenants.revoke_key(seen.get("key"))
        return _go(link("operator"))

    async def set_limits(self, seen: Seen) -> Response:
        """Set the limits of a tenant."""
        given = {name: _limit(name, seen.get(name)) for name in LIMIT_TEXTS}
        await self._of.tenants.set_limits(seen.get("tenant"), Limits(**given))  # type: ignore[arg-type]
        return _go(link("operator"))

    # Replays of transcripts

    async def show_replays(self, seen: Seen) -> Response:
        """The demo, a place to drop a transcript on, and the replays that are kept."""
        found, _ = await self._of.sessions.page(
            replay_tenant(seen.visit.tenant), Narrowing(), sort="created", after=None, limit=50
        )
        return self._render(
            seen, "replay.html", "replay", listed=[(each, _replay_of(each.session.metadata)) for each in found],
            strategies=STRATEGIES, policies=REPLAY_POLICIES, most=MAX_BYTES // 2**20, seconds=MAX_SECONDS,
        )  # fmt: skip

    async def play_demo(self, seen: Seen) -> Response:
        """Play the built-in transcript."""
        options = ReplayOptions(epoch=DEMO_EPOCH)
        content = await asyncio.to_thread(DEMO.read_bytes)
        return _go(await self._play(seen, DEMO_NAME, content, options))

    async def play_file(self, seen: Seen, content: bytes) -> Response:
        """Play an uploaded transcript, and return the address of the result."""
        options = ReplayOptions(
            strategy=seen.get("strategy"), epoch=seen.get("epoch"), model=seen.get("model").strip()[:200]
        )
        return JSONResponse(
            {"go": await self._play(seen, seen.get("name"), content, options)},
            headers={**HEADERS, "cache-control": "no-store"},
        )

    async def _play(self, seen: Seen, name: str, content: bytes, options: ReplayOptions) -> str:
        """Play a transcript and return the address of the result. Raises `InvalidRequest`, `Busy`."""
        replays = self._of.replays
        replay = await replays.start(seen.visit.tenant, await replays.read(name, content), options)
        await replays.wait(replay, PATIENCE)
        if replay.trouble and not replay.played:
            raise InvalidRequest(replay.trouble, field="file")
        if len(replay.sessions) == 1:
            return link("replay/session", id=replay.sessions[0])
        return link("replay")

    async def delete_replay(self, seen: Seen) -> Response:
        """Delete a replay."""
        await self._of.sessions.delete(replay_tenant(seen.visit.tenant), seen.get("id"))
        return _go(link("replay"))

    async def show_session_savings(self, seen: Seen) -> Response:
        """Show the cost of each call of a session beside the cost of the full history."""
        session_id = seen.get("id")
        listed = await self._of.sessions.figures(seen.tenant, session_id)
        calls = await self._of.calls.last(seen.tenant, session_id, limit=1000)
        chart = [
            [call.row.number, call.row.cost_sent, call.row.cost_full, call.row.tokens_before, call.row.tokens_after]
            for call in calls
        ]
        return self._render(
            seen, "session_savings.html", "sessions", tab="savings", listed=listed, calls=list(reversed(calls)),
            shadow=await self._of.savings.shadow_of(seen.tenant, session_id),
            chart=msgspec.json.encode(chart).decode(),
        )  # fmt: skip

    # Over all sessions

    async def show_savings(self, seen: Seen) -> Response:
        """Money and tokens by day, model, strategy or client."""
        by = cast("GroupBy", seen.get("by") if seen.get("by") in get_args(GroupBy) else "day")
        days = seen.get("days") if seen.get("days") in PERIODS else "30"
        since = _since(days, seen.now)
        report = await self._of.savings.report(seen.tenant, since=since, by=by)
        daily = report if by == "day" else await self._of.savings.report(seen.tenant, since=since, by="day")
        chart = [
            [row.key, row.money.sent if row.money else None, row.money.full if row.money else None, row.tokens_before,
             row.tokens_after]
            for row in daily.rows
        ]  # fmt: skip
        return self._render(
            seen, "savings.html", "savings", report=report, by=by, days=days, periods=PERIODS,
            groups=get_args(GroupBy), chart=msgspec.json.encode(chart).decode(),
        )  # fmt: skip

    async def show_search(self, seen: Seen) -> Response:
        """Messages of all sessions."""
        query = seen.get("query").strip()
        mode = cast("Mode", seen.get("mode") if seen.get("mode") in get_args(Mode) else "search")
        session_id = seen.get("id")
        listed = await self._of.sessions.figures(seen.tenant, session_id) if session_id else None
        found = None
        if query and listed is not None:
            found = await self._of.search.search_session(seen.tenant, session_id, query, mode=mode)
        elif query:
            found = await self._of.search.search(seen.tenant, query, mode=mode, limit=50)
        calls = await self._of.calls.first_with(
            seen.tenant, [(hit.session_id, hit.seq) for hit in found.hits] if found is not None else []
        )
        return self._render(
            seen, "search.html", "sessions" if listed is not None else "search", query=query, mode=mode, found=found,
            mark=_marked, listed=listed, tab="", calls=calls,
        )  # fmt: skip

    async def show_live(self, seen: Seen) -> Response:
        """Calls as they run."""
        latest, _ = await self._of.calls.latest(seen.tenant, after=None, limit=30)
        running = _running(await self._of.activity.running(seen.tenant), self._of.board.running(seen.tenant))
        overheads = sorted(call.row.overhead_ms for call in latest if call.row.overhead_ms is not None)
        return self._render(
            seen, "live.html", "live", latest=latest, running=running, overheads=overheads,
            notes=[_written(note) for note in self._of.board.notes(seen.tenant)],
        )  # fmt: skip

    async def stream_live(self, seen: Seen) -> Response:
        """The events of the live view."""
        headers = {**HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(seen.tenant), media_type="text/event-stream", headers=headers)

    async def _events(self, tenant: str) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        shown: object = None
        async for found in self._of.activity.follow(tenant):
            for each in found:
                yield b"event: happening\ndata: %b\n\n" % msgspec.json.encode(_event_row(each))
            now = {
                "calls": _running(await self._of.activity.running(tenant), self._of.board.running(tenant)),
                "notes": [_written(note) for note in self._of.board.notes(tenant)],
            }
            if now != shown:
                shown = now
                yield b"event: running\ndata: %b\n\n" % msgspec.json.encode(now)
            else:
                yield b": quiet\n\n"
            await asyncio.sleep(0)


def _running(stored: Sequence[StoredCall], here: Sequence[RunningCall]) -> list[dict[str, Any]]:
    """Calls under way: those that the database knows, with the state of those that this worker makes, and the rest."""
    states = {call.session_id: call.state for call in here if call.session_id}
    known = {call.session_id for call in stored}
    found: list[dict[str, Any]] = [
        {
            "link": link("session", id=call.session_id),
            "title": readable(call.title or call.session_id),
            "call": call.number,
            "client": call.client or "",
            "state": states.get(call.session_id, "under way"),
            "since": call.created_at,
        }
        for call in stored
    ]
    found += [
        {
            "link": link("session", id=call.session_id) if call.session_id else "",
            "title": call.session_id or "a call that is not stored yet",
            "call": None,
            "client": call.client,
            "state": call.state,
            "since": call.began,
        }
        for call in here
        if call.session_id not in known
    ]
    return found


def _written(note: Note) -> dict[str, Any]:
    return {
        "kind": note.kind,
        "at": note.at,
        "text": note.text,
        "link": link("session", id=note.session_id) if note.session_id else "",
    }


def _event_row(happening: Happening) -> dict[str, Any]:
    row = happening.body
    event: dict[str, Any] = {
        "kind": happening.kind,
        "session": happening.session_id,
        "at": happening.at,
        "link": link("session", id=happening.session_id),
    }
    if isinstance(row, CallRow):
        seconds = (row.finished_at - row.created_at).total_seconds() if row.finished_at else None
        hit = row.cached_tokens / row.input_tokens if row.cached_tokens is not None and row.input_tokens else None
        return event | {
            "link": link("session", id=row.session_id, call=row.number),
            "number": row.number,
            "model": row.model,
            "client": row.client,
            "strategy": row.strategy,
            "before": row.tokens_before,
            "after": row.tokens_after,
            "hit": hit,
            "status": row.status,
            "seconds": seconds,
            "overhead": row.overhead_ms,
        }
    return event | {"reason": row.get("reason") or row.get("result") or "", "number": row.get("number")}


def _replay_of(metadata: bytes) -> dict[str, Any]:
    """Return what a replay's session records about its transcript."""
    try:
        known = json.loads(metadata or b"{}")
    except ValueError:
        return {}
    found = known.get("replay") if isinstance(known, dict) else None
    return found if isinstance(found, dict) else {}


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


def _lines(text: str) -> str:
    """A form's text with the line ends that were typed."""
    return text.replace("\r\n", "\n")


def _tags(seen: Seen) -> list[str]:
    return seen.get("tags").replace(",", " ").split()


def _since(days: str, now: datetime) -> datetime | None:
    if days not in PERIODS:
        return None
    start = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return start - timedelta(days=int(days) - 1)


def _gaps(start: int, end: int) -> list[tuple[int, int]]:
    """Portions of rows that are not on the page: (first, how many)."""
    return [(first, min(ROWS, end - first)) for first in range(start, end, ROWS)]


def _setting(text: str) -> Any:
    """A setting as it was typed: a name, or JSON. Raises `InvalidRequest`."""
    text = text.strip()
    if not text.startswith("{"):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"strategy is not valid JSON: {error}", field="strategy") from None


def _difference(before: str, after: str) -> list[tuple[Literal["same", "out", "in"], str]]:
    kinds: dict[str, Literal["same", "out", "in"]] = {"  ": "same", "- ": "out", "+ ": "in"}
    return [
        (kinds[line[:2]], line[2:])
        for line in difflib.ndiff(before.splitlines(), after.splitlines())
        if line[:2] in kinds
    ]


def _marked(text: str, query: str) -> list[tuple[bool, str]]:
    """Split text into pieces, with those that match the query marked."""
    words = sorted({query, *query.split()}, key=len, reverse=True)
    folded = text.lower()
    found: list[tuple[bool, str]] = []
    place = plain = 0
    while place < len(text):
        hit = next((word for word in words if word and folded.startswith(word.lower(), place)), None)
        if hit is None or len(folded) != len(text):
            place += 1
            continue
        found += [(False, text[plain:place]), (True, text[place : place + len(hit)])]
        place = plain = place + len(hit)
    return [*found, (False, text[plain:])]


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


def _go(path: str) -> RedirectResponse:
    return RedirectResponse(path, status_code=303, headers={**HEADERS, "cache-control": "no-store"})
