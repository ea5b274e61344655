"""Getting a call ready: its session, its context, and the bytes that go upstream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from app.dialects.dialect import Dialect, Overflow, Request, ToolOffer
from app.dialects.rounds import tool_names
from app.domain import clients
from app.domain.errors import ContextTooLarge, StoreUnavailable
from app.domain.extraction import Extract
from app.domain.models import known_window, usable_window
from app.domain.sessions import Session
from app.service import contexts, identity, tokens
from app.service.arrival import NEWEST, Arrival, arrive
from app.service.aside import aside
from app.service.calibrations import Calibrations
from app.service.calls import Call, Labels
from app.service.contexts import Built, Circumstances, History, Recipe
from app.service.identity import Asked, Found
from app.service.memo import MessageMemo
from app.service.memo_layer import with_memos
from app.service.named import LaidOut
from app.service.recipes import Recipes
from app.service.retrieval import Retriever
from app.store.artifacts import spilled
from app.store.connection import Database
from app.store.lookups import Lookups
from app.store.writes import Attribute, Keeper, Named, NewSession, RequestWrite, Said
from app.strategies.compositions import overflow_tries
from app.strategies.presets import strategy_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """A body for the upstream. ``strip_usage``: the usage in the reply is only there because we ask for it; ``tools``:
    the names of ours that it offers.
    """

    body: bytes
    strip_usage: bool = False
    tools: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A call that is ready to go upstream. ``built`` is None where no context could be built: then the client's own
    bytes go out, and judging them is the provider's business.

    ``tools`` are the names of ours that the model may call, ``extra`` is what was said and answered since the context
    was built, in wire form; ``is_last``: after that the model has to answer. ``laid``: the request names its history;
    ``is_at_host``: the model host is left to know it. ``keeper``: who has the history up to the reply then.
    """

    request: Request
    arrival: Arrival
    found: Found
    recipe: Recipe
    around: Circumstances
    history: History
    built: Built | None
    body: bytes
    write: RequestWrite
    started: datetime
    strip_usage: bool
    labels: Labels
    tools: frozenset[str] = frozenset()
    extra: Sequence[bytes] = ()
    is_last: bool = False
    laid: LaidOut | None = None
    is_at_host: bool = False
    keeper: Keeper = "tersely"
    written: asyncio.Future[None] | None = field(default=None)

    @property
    def extract(self) -> Extract:
        """What is to be taken out of the reply."""
        return self.recipe.extract


class Preparer:
    """Prepares the calls of one dialect. The request path's reads are all here."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        database: Database,
        lookups: Lookups,
        recipes: Recipes,
        calibrations: Calibrations,
        memo: MessageMemo,
        retriever: Retriever,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._dialect = dialect
        self._database = database
        self._lookups = lookups
        self._recipes = recipes
        self._calibrations = calibrations
        self._memo = memo
        self._retriever = retriever
        self._clock = clock
        self._new_id = new_id
        self._fixed_tokens = tokens.FixedTokens()

    async def prepare(self, call: Call, request: Request, headers: dict[str, str]) -> Prepared:
        """Find the session, build the context, write the upstream's body. Raises `StoreUnavailable`."""
        now = self._clock()
        arrival, asked = await self.arrive(call, request, headers)
        return await self.go_into(call, request, arrival, asked, now)

    async def arrive(self, call: Call, request: Request, headers: dict[str, str]) -> tuple[Arrival, Asked]:
        """The request's messages, and what it says of its session."""
        asked = Asked(
            session_id=call.options.session_id,
            client=clients.client_ids(headers, request.ids),
            is_retry=clients.is_retry(headers),
            reply_id=request.reply_id,
            conversation=request.conversation,
        )
        return await aside(len(call.body), arrive, request.messages, self._memo.identify), asked

    async def go_into(self, call: Call, request: Request, arrival: Arrival, asked: Asked, now: datetime) -> Prepared:
        """The call with all of its history, which has arrived. Raises `StoreUnavailable`."""
        found, recipe, around, history = await self._look_up(call, request, arrival, asked, now)
        return await self.finish(call, request, arrival, found, recipe, around, history)

    async def finish(
        self,
        call: Call,
        request: Request,
        arrival: Arrival,
        found: Found,
        recipe: Recipe,
        around: Circumstances,
        history: History,
        *,
        laid: LaidOut | None = None,
    ) -> Prepared:
        """The call with a context of that history."""
        size = len(call.body)
        history, said = await with_memos(
            self._database, call.tenant, found, history, recipe.strategy, arrival, self._dialect
        )
        built = await aside(size, self._build, history, recipe, around, request.model)
        if built is None and _shows_hidden(found):
            # The client's own bytes would show what is hidden: better what is live, whatever the window.
            unbounded = replace(history, snapshot=replace(history.snapshot, window=None))
            built = await aside(size, self._build, unbounded, recipe, around, request.model)
        composed = await aside(size, self._compose, call, request, arrival, found, recipe, history, built)
        is_own_body = composed.body is call.body
        is_whole = is_own_body and not (found.is_delta or request.names_history)
        return Prepared(
            request=request,
            arrival=arrival,
            found=found,
            recipe=recipe,
            around=around,
            history=history,
            built=built,
            body=composed.body,
            write=await aside(
                size, self.request_write, call, request, arrival, found, said, around.now, laid.named if laid else None
            ),
            started=around.now,
            strip_usage=composed.strip_usage,
            tools=composed.tools,
            labels=self._label(call, found, recipe, built, is_own_body=is_own_body),
            laid=laid,
            keeper="both" if is_whole and request.is_kept else "tersely",
        )

    async def _look_up(
        self, call: Call, request: Request, arrival: Arrival, asked: Asked, now: datetime
    ) -> tuple[Found, Recipe, Circumstances, History]:
        """The session and what its context needs. A history that goes on where it ended takes one shared lookup."""
        found = None
        size = len(call.body)
        chains = arrival.reply_chains()[:NEWEST] if asked.session_id is None else []
        if chains:
            hit = await self._lookups.find(call.tenant, chains, asked.client.id)
            found = await aside(size, identity.continued, arrival, asked, hit) if hit is not None else None
        if found is not None:
            recipe = self.recipe(call, request, found.session)
            around = self.circumstances(request, arrival, recipe, now, found)
            history = None
            if not found.needs_all(recipe.reach(contexts.epoch_of(found))):
                history = await aside(size, contexts.of_resent, found, arrival, recipe, around, self._memo.restore)
            if history is not None:
                return found, recipe, around, history
        async with self._database.reading(call.tenant) as connection:
            if found is None:
                found = await identity.find(connection, call.tenant, arrival, asked, now=now, new_id=self._new_id)
            recipe = self.recipe(call, request, found.session)
            if found.needs_all(recipe.reach(contexts.epoch_of(found))):
                found = await identity.with_everything(connection, call.tenant, arrival, found)
            around = self.circumstances(request, arrival, recipe, now, found)
            history = await contexts.load(
                connection, call.tenant, found, arrival, self._dialect, recipe, around, restore=self._memo.restore
            )
        history = await self._retriever.with_past(
            call.tenant, found, history, recipe.strategy, arrival, self._dialect, self._memo.restore
        )
        return found, recipe, around, history

    def recipe(self, call: Call, request: Request, session: Session | None) -> Recipe:
        """The recipe, without instructions that cannot be followed here and tools that cannot be offered: of what a
        model cannot use it is told nothing.
        """
        recipe = self._recipes.choose(strategy=call.options.strategy, epoch=call.options.epoch, session=session)
        if not request.takes_additions:
            return replace(recipe, instructions=None, offers=())
        if not recipe.offers:
            return recipe
        # A stream that is one JSON array cannot be gone on with, nor can several replies at once.
        is_array = self._dialect.streaming.has_arrays and request.stream and "alt=sse" not in call.path
        rounds = self._dialect.rounds if request.takes_tools and request.n == 1 and not is_array else None
        offers = rounds and _not_named(recipe.offers, request.tools, rounds.brought_along(call.body))
        return recipe if offers == recipe.offers else replace(recipe, offers=offers or ())

    def circumstances(
        self, request: Request, arrival: Arrival, recipe: Recipe, now: datetime, found: Found
    ) -> Circumstances:
        """What the decision about a context looks at besides the history."""
        ratio = self._calibrations.ratio(request.model)
        window = usable_window(request.model, request.max_tokens)
        raws = [m.raw for m, i in zip(arrival.messages, arrival.incoming, strict=True) if not i.is_link]
        fixed = self._fixed_tokens.count(request.model, raws, request.tools)
        if recipe.instructions:
            fixed += tokens.count_short(recipe.instructions)
        fixed += contexts.count_offers(found.session.plan if found.session else None, recipe)
        return Circumstances(
            fixed_tokens=fixed,
            window=None if window is None else int(window / ratio),
            now=now,
            model_window=known_window(request.model),
        )

    def _build(self, history: History, recipe: Recipe, around: Circumstances, model: str) -> Built | None:
        try:
            return contexts.make(history, recipe, around, model)
        except ContextTooLarge:
            return None

    def _compose(
        self,
        call: Call,
        request: Request,
        arrival: Arrival,
        found: Found,
        recipe: Recipe,
        history: History,
        built: Built | None,
        extra: Sequence[bytes] = (),
        *,
        is_last: bool = False,
    ) -> _Composed:
        """What goes upstream, ``extra`` messages behind the context. ``is_last``: no tool may be called any more, or,
        where the client says that one has to be, none of ours.
        """
        asks_usage = request.stream and not request.include_usage
        if built is None:
            return _Composed(body=call.body)
        must_call = _must_call(request)
        # Tools stand in front of everything, so that the cached beginning of a prompt depends on them: where the client
        # forces one of its own or forbids all, ours stay there. The model cannot call them then.
        all_offers = contexts.offers_in(built.context.epoch, recipe)
        offers = () if is_last and must_call else all_offers
        is_verbatim = built.context.is_whole and history.is_verbatim and recipe.instructions is None
        is_verbatim = is_verbatim and not request.names_history
        if is_verbatim and not (asks_usage or offers or extra):
            return _Composed(body=call.body)
        if is_verbatim:
            laid_out = contexts.LaidOut(messages=[message.raw for message in arrival.messages])
        else:
            laid_out = contexts.lay_out(built.context, self._dialect, history, arrival, found)
        # What was said in rounds is the end of the tail. A prompt that is the client's own throughout the epoch is
        # marked by the client alone: its messages may go up as they came at any call.
        laid_out = replace(laid_out, messages=[*laid_out.messages, *extra])
        is_own = recipe.instructions is None and not all_offers and built.context.epoch.cut == 1
        is_own = is_own and not (found.is_delta or request.names_history)
        body = self._dialect.without_history(call.body) if request.names_history else call.body
        if offers:
            body = self._dialect.add_tools(body, offers)
        body = self._dialect.write_request(
            body,
            messages=laid_out.messages,
            instructions=recipe.instructions,
            include_usage=asks_usage,
            breakpoints=() if is_own else laid_out.breakpoints(),
        )
        if built.context.must_answer or (is_last and not must_call):
            body = self._dialect.forbid_tools(body)
        return _Composed(body=body, strip_usage=asks_usage, tools=frozenset(offer.name for offer in offers))

    def go_on(self, call: Call, prepared: Prepared, extra: Sequence[bytes], *, is_last: bool) -> Prepared:
        """The same call, after another round."""
        prepared = replace(prepared, extra=tuple(extra), is_last=is_last)
        return replace(prepared, body=self._compose_again(call, prepared).body)

    def _compose_again(self, call: Call, prepared: Prepared) -> _Composed:
        return self._compose(
            call,
            prepared.request,
            prepared.arrival,
            prepared.found,
            prepared.recipe,
            prepared.history,
            prepared.built,
            prepared.extra,
            is_last=prepared.is_last,
        )

    def request_write(
        self,
        call: Call,
        request: Request,
        arrival: Arrival,
        found: Found,
        said: Mapping[int, Said],
        now: datetime,
        named: Named | None,
    ) -> RequestWrite:
        """What is to be stored of the request. ``named``: the reply that it goes on from, where it says no more."""
        attributes: list[Attribute] = []
        if request.tools and self._fixed_tokens.is_new(call.tenant, found.session_id, request.tools):
            attributes.append(Attribute(digest=tokens.content_digest(request.tools), kind="tools", raw=request.tools))
        session = found.session
        is_open = session is None or not arrival.reply_chains()
        return RequestWrite(
            tenant=call.tenant,
            session_id=found.session_id,
            create=None
            if session
            else NewSession(
                parent=found.parent,
                client_id=clients.client_ids(call.header_map, request.ids).id,
                spare_id=found.spare_id,
            ),
            mode="append" if found.is_delta else "full",
            dialect=self._dialect.name,
            incoming=arrival.incoming,
            raws=[message.raw for message in arrival.messages],
            tokens=(),
            decision=found.decision,
            said=said,
            session=session,
            now=now,
            attributes=attributes,
            spill=partial(spilled, arrival.messages),
            open_chain=arrival.head_chain if is_open and not (found.is_delta or named) else None,
            named=named,
            replaces_instructions=found.is_delta and any(not incoming.is_link for incoming in arrival.incoming),
        )

    def _label(self, call: Call, found: Found, recipe: Recipe, built: Built | None, *, is_own_body: bool) -> Labels:
        labels = Labels(
            context="passthrough" if is_own_body else "built",
            strategy=strategy_name(recipe.strategy),
            session_id=found.session_id,
            source=found.source,
        )
        if built is not None:
            report = built.context.report
            labels.epoch = report.epoch
            labels.tokens_before, labels.tokens_after = report.tokens_before, report.tokens_after
        del call
        return labels

    async def reduce(self, call: Call, prepared: Prepared, overflowed: Overflow) -> Prepared | None:
        """The same call with a smaller context; None when none can be made."""
        if prepared.history.overflows >= overflow_tries(prepared.recipe.strategy):
            return None
        around = prepared.around
        if overflowed.limit:
            reserve = prepared.request.max_tokens
            window = max(overflowed.limit // 4, overflowed.limit - (reserve or overflowed.limit // 8))
            ratio = self._calibrations.ratio(prepared.request.model)
            around = replace(around, window=int(window / ratio))
        try:
            history = await contexts.after_overflow(
                self._database, call.tenant, prepared.found, prepared.history, prepared.recipe, around
            )
        except StoreUnavailable:
            return None
        before = prepared.built.context.report.tokens_after if prepared.built else None
        less = await self.rebuild(call, replace(prepared, around=around, history=history))
        if less is None or less.built is None:
            return None
        return less if before is None or less.built.context.report.tokens_after < before else None

    async def rebuild(self, call: Call, prepared: Prepared) -> Prepared | None:
        """The same call with a context of the history that it has now; None when none can be built."""
        size = len(call.body)
        built = await aside(
            size, self._build, prepared.history, prepared.recipe, prepared.around, prepared.request.model
        )
        if built is None:
            return None
        labels = self._label(call, prepared.found, prepared.recipe, built, is_own_body=False)
        labels.overhead_ms = prepared.labels.overhead_ms
        anew = replace(prepared, built=built, labels=labels, keeper="tersely")
        composed = await aside(size, self._compose_again, call, anew)
        # What was called already is answered, whatever is offered now.
        tools = composed.tools | (prepared.tools if prepared.extra else frozenset())
        return replace(anew, body=composed.body, strip_usage=composed.strip_usage, tools=tools)


def _not_named(offers: tuple[ToolOffer, ...], tools: bytes, others: frozenset[str]) -> tuple[ToolOffer, ...]:
    """The offers without those whose names are taken by tools of the client; ``others``: beside its list."""
    if not others and b"\\u" not in tools and not any(offer.name.encode() in tools for offer in offers):
        return offers
    theirs = tool_names(tools) | others
    return tuple(offer for offer in offers if offer.name not in theirs)


def _shows_hidden(found: Found) -> bool:
    """Whether the request carries what was dropped, taken back or removed."""
    return any(placed.turn > 0 and placed.status != "live" for placed in found.decision.placed)


def _must_call(request: Request) -> bool:
    """Whether the client says that the model has to call a tool, or which."""
    choice = request.tool_choice.lower()
    return choice not in {b"", b"null"} and b"auto" not in choice and b"none" not in choice
