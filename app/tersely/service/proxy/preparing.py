"""Getting a call ready: its session, its context, and the bytes that go upstream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect, Overflow, Request, ToolOffer
from tersely.dialects.tool_rounds import tool_names
from tersely.domain.errors import ContextTooLarge, StoreUnavailable
from tersely.domain.history.sessions import Session, title_of
from tersely.domain.models import known_window, usable_window
from tersely.domain.text.tags import NOTHING, TagKinds
from tersely.service.common import tokens
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.building import BuiltContext, build
from tersely.service.context.context_config import ContextConfig, TokenBudget, count_offers, offers_in
from tersely.service.context.context_configs import ContextConfigs, compact_setting
from tersely.service.context.entries import Restore
from tersely.service.context.history import History, epoch_of
from tersely.service.context.loading import after_overflow, load_history, load_resent
from tersely.service.context.memo_layer import with_memos
from tersely.service.context.parse_cache import ParseCache
from tersely.service.context.rendering import RenderedMessages, render_messages
from tersely.service.context.retrieval import Retriever
from tersely.service.context.sent_contexts import ADDED, FULL, INSTRUCTIONS, Description, Source
from tersely.service.context.shown_tags import kinds_shown
from tersely.service.proxy.calls import Call, ContextLabels
from tersely.service.proxy.history_by_reference import ResolvedHistory
from tersely.service.proxy.live_sessions import LiveSession
from tersely.service.recognition import session_lookup as identity
from tersely.service.recognition.incoming_history import NEWEST, IncomingHistory, hash_history
from tersely.service.recognition.session_lookup import SessionHints, SessionMatch, idempotency_key
from tersely.store.commit.records import (
    Attribute,
    HiddenReplyParts,
    HistoryOwner,
    NewSession,
    ReferencedReply,
    RequestWrite,
)
from tersely.store.db.connection import Database
from tersely.store.history.artifacts import spilled
from tersely.store.history.lookups import Lookups
from tersely.store.history.tail_cache import ROW_SIZE
from tersely.strategies.composition import overflow_tries
from tersely.strategies.presets import strategy_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Composed:
    """A body for the upstream. ``strip_usage``: the usage in the reply is only there because we ask for it; ``tools``:
    the names of ours that it offers; ``sources``: where its messages come from (None: they are the request's own).
    """

    body: bytes
    strip_usage: bool = False
    tools: frozenset[str] = frozenset()
    sources: Sequence[Source] | None = None


@dataclass(slots=True, kw_only=True)
class PreparedCall:
    """A call that is ready to go upstream. ``built`` is None where no context could be built: then the client's own
    bytes go out, and judging them is the provider's business.

    ``tools`` are the names of ours that the model may call, ``extra`` is what was said and answered since the context
    was built, in wire form; ``is_last``: after that the model has to answer. ``laid``: the request names its history;
    ``is_at_host``: the model host is left to know it. ``keeper``: who has the history up to the reply then.
    ``sources`` are those of the messages in ``body`` (None: they are the request's own), ``rounds`` the bodies before
    it, ``description`` says what a body sends. ``client`` names the program that made the call.

    ``live`` is the live session that the call continues. Then ``request``, ``arrival``, ``found`` and ``history`` hold
    only what comes after the messages that it knows, and ``expand`` gives the call with all of it.
    """

    call: Call
    request: Request
    arrival: IncomingHistory
    found: SessionMatch
    recipe: ContextConfig
    around: TokenBudget
    history: History
    built: BuiltContext | None
    body: bytes
    write: RequestWrite
    started: datetime
    strip_usage: bool
    labels: ContextLabels
    tools: frozenset[str] = frozenset()
    extra: Sequence[bytes] = ()
    is_last: bool = False
    laid: ResolvedHistory | None = None
    is_at_host: bool = False
    keeper: HistoryOwner = "tersely"
    shown_kinds: TagKinds = NOTHING
    sources: Sequence[Source] | None = None
    rounds: tuple[bytes, ...] = ()
    description: Description | None = None
    client: str | None = None
    request_id: str | None = None
    written: asyncio.Future[None] | None = field(default=None)
    live: LiveSession | None = None
    expand: Callable[[], PreparedCall] | None = None

    @property
    def whole(self) -> PreparedCall:
        """The call with its whole history. O(size of the request) for a call that continues a live session."""
        return self if self.expand is None else self.expand()

    @property
    def extract(self) -> TagKinds:
        """What is to be taken out of the reply: what the strategy asks for, and what the model sees itself write."""
        return self.recipe.hidden_tags | self.shown_kinds


class CallPreparer:
    """Prepares the calls of one dialect. The request path's reads are all here."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        database: Database,
        lookups: Lookups,
        recipes: ContextConfigs,
        calibrations: Calibrations,
        memo: ParseCache,
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

    def read(self, call: Call) -> tuple[Request, IncomingHistory]:
        """Read the whole of a request."""
        request = self._dialect.read_request(call.body, self._memo.read)
        return request, hash_history(request.messages, self._memo.identify)

    @property
    def restore(self) -> Restore:
        """Put the model's own words back into a client's echo of a reply."""
        return self._memo.restore

    async def prepare(self, call: Call, request: Request, headers: dict[str, str]) -> PreparedCall:
        """Find the session, build the context, write the upstream's body. Raises `StoreUnavailable`."""
        now = self._clock()
        arrival, asked = await self.hash_history(call, request, headers)
        return await self.go_into(call, request, arrival, asked, now)

    async def hash_history(
        self, call: Call, request: Request, headers: dict[str, str]
    ) -> tuple[IncomingHistory, SessionHints]:
        """The request's messages, and what it says of its session."""
        asked = SessionHints(
            session_id=call.options.session_id,
            client=clients.client_ids(headers, request.ids),
            is_retry=clients.is_retry(headers),
            key=idempotency_key(headers),
            headers=headers,
            reply_id=request.reply_id,
            conversation=request.conversation,
        )
        return await run_in_thread_if_large(len(call.body), hash_history, request.messages, self._memo.identify), asked

    async def go_into(
        self, call: Call, request: Request, arrival: IncomingHistory, asked: SessionHints, now: datetime
    ) -> PreparedCall:
        """The call with all of its history, which has arrived. Raises `StoreUnavailable`."""
        found, recipe, around, history = await self._look_up(call, request, arrival, asked, now)
        return await self.finish(call, request, arrival, found, recipe, around, history)

    async def finish(
        self,
        call: Call,
        request: Request,
        arrival: IncomingHistory,
        found: SessionMatch,
        recipe: ContextConfig,
        around: TokenBudget,
        history: History,
        *,
        laid: ResolvedHistory | None = None,
    ) -> PreparedCall:
        """The call with a context of that history."""
        size = _work_of(call, found)
        history, said = await with_memos(
            self._database, call.tenant, found, history, recipe.strategy, arrival, self._dialect
        )
        built = await run_in_thread_if_large(size, self._build, history, recipe, around, request.model)
        if built is None and _shows_hidden(found):
            # The client's own bytes would show what is hidden: better what is live, whatever the window.
            unbounded = replace(history, snapshot=replace(history.snapshot, window=None))
            built = await run_in_thread_if_large(size, self._build, unbounded, recipe, around, request.model)
        composed = await run_in_thread_if_large(
            size, self._compose, call, request, arrival, found, recipe, history, built
        )
        is_own_body = composed.body is call.body
        is_whole = is_own_body and not (found.is_delta or request.references_history)
        return PreparedCall(
            call=call,
            request=request,
            arrival=arrival,
            found=found,
            recipe=recipe,
            around=around,
            history=history,
            built=built,
            body=composed.body,
            write=await run_in_thread_if_large(
                size, self.request_write, call, request, arrival, found, said, around.now, laid.named if laid else None
            ),
            started=around.now,
            strip_usage=composed.strip_usage,
            tools=composed.tools,
            client=client_name(call.header_map) or None,
            request_id=call.request_id or None,
            sources=composed.sources,
            labels=self._label(call, found, recipe, built, is_own_body=is_own_body),
            laid=laid,
            shown_kinds=kinds_shown(built.context.messages, known=recipe.hidden_tags) if built else NOTHING,
            keeper="both" if is_whole and request.is_stored else "tersely",
        )

    async def _look_up(
        self, call: Call, request: Request, arrival: IncomingHistory, asked: SessionHints, now: datetime
    ) -> tuple[SessionMatch, ContextConfig, TokenBudget, History]:
        """The session and what its context needs. A history that goes on where it ended takes one shared lookup."""
        found = None
        size = len(call.body)
        chains = arrival.reply_chains()[:NEWEST] if asked.session_id is None else []
        if chains:
            hit = await self._lookups.find(call.tenant, chains, asked.client.id)
            found = (
                await run_in_thread_if_large(size, identity.continued, arrival, asked, hit) if hit is not None else None
            )
        if found is not None:
            recipe = self.recipe(call, request, found.session)
            around = self.circumstances(request, arrival, recipe, now, found)
            history = None
            if not found.needs_all(recipe.first_seq(epoch_of(found, recipe))):
                history = await run_in_thread_if_large(
                    size, load_resent, found, arrival, self._dialect, recipe, around, self._memo.restore
                )
            if history is not None:
                return found, recipe, around, history
        async with self._database.reading(call.tenant) as connection:
            if found is None:
                found = await identity.find(connection, call.tenant, arrival, asked, now=now, new_id=self._new_id)
            recipe = self.recipe(call, request, found.session)
            if found.needs_all(recipe.first_seq(epoch_of(found, recipe))):
                found = await identity.with_everything(connection, call.tenant, arrival, found)
            around = self.circumstances(request, arrival, recipe, now, found)
            history = await load_history(
                connection, call.tenant, found, arrival, self._dialect, recipe, around, restore=self._memo.restore
            )
        history = await self._retriever.with_past(
            call.tenant, found, history, recipe.strategy, arrival, self._dialect, self._memo.restore
        )
        return found, recipe, around, history

    def recipe(self, call: Call, request: Request, session: Session | None) -> ContextConfig:
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
        offers = rounds and _not_named(recipe.offers, request.tools, rounds.tools_outside_list(call.body))
        return recipe if offers == recipe.offers else replace(recipe, offers=offers or ())

    def circumstances(
        self, request: Request, arrival: IncomingHistory, recipe: ContextConfig, now: datetime, found: SessionMatch
    ) -> TokenBudget:
        """What the decision about a context looks at besides the history."""
        ratio = self._calibrations.ratio(request.model)
        window = usable_window(request.model, request.max_tokens)
        raws = [message.raw for message in arrival.messages if message.is_instruction]
        fixed = self._fixed_tokens.count(request.model, raws, request.tools)
        if recipe.instructions:
            fixed += tokens.count_short(recipe.instructions)
        fixed += count_offers(found.session.plan if found.session else None, recipe)
        return TokenBudget(
            fixed_tokens=fixed,
            window=None if window is None else int(window / ratio),
            now=now,
            model_window=known_window(request.model),
        )

    def _build(self, history: History, recipe: ContextConfig, around: TokenBudget, model: str) -> BuiltContext | None:
        try:
            return build(history, recipe, around, model)
        except ContextTooLarge:
            return None

    def _compose(
        self,
        call: Call,
        request: Request,
        arrival: IncomingHistory,
        found: SessionMatch,
        recipe: ContextConfig,
        history: History,
        built: BuiltContext | None,
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
        all_offers = offers_in(built.context.epoch, recipe)
        offers = () if is_last and must_call else all_offers
        is_verbatim = built.context.is_whole and history.is_verbatim and recipe.instructions is None
        is_verbatim = is_verbatim and not request.references_history
        if is_verbatim and not (asks_usage or offers or extra):
            return _Composed(body=call.body)
        if is_verbatim:
            laid_out = RenderedMessages(
                messages=[message.raw for message in arrival.messages], sources=own_sources(arrival, found)
            )
        else:
            laid_out = render_messages(built.context, self._dialect, history, arrival, found)
        # What was said in rounds is the end of the tail. A prompt that is the client's own throughout the epoch is
        # marked by the client alone: its messages may go up as they came at any call.
        laid_out = replace(
            laid_out,
            messages=[*laid_out.messages, *extra],
            sources=[*laid_out.sources, *(Source(raw, 0, ADDED, "tool_round") for raw in extra)],
        )
        is_own = recipe.instructions is None and not all_offers and built.context.epoch.cut == 1
        is_own = is_own and not (found.is_delta or request.references_history)
        body = self._dialect.without_history(call.body) if request.references_history else call.body
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
        return _Composed(
            body=body,
            strip_usage=asks_usage,
            tools=frozenset(offer.name for offer in offers),
            sources=laid_out.sources,
        )

    def go_on(self, call: Call, prepared: PreparedCall, extra: Sequence[bytes], *, is_last: bool) -> PreparedCall:
        """The same call, after another round."""
        whole = prepared.whole
        prepared = replace(whole, extra=tuple(extra), is_last=is_last, rounds=(*prepared.rounds, prepared.body))
        composed = self._compose_again(call, prepared)
        return replace(prepared, body=composed.body, sources=composed.sources)

    def _compose_again(self, call: Call, prepared: PreparedCall) -> _Composed:
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
        arrival: IncomingHistory,
        found: SessionMatch,
        said: Mapping[int, HiddenReplyParts],
        now: datetime,
        named: ReferencedReply | None,
    ) -> RequestWrite:
        """What is to be stored of the request. ``named``: the reply that it goes on from, where it says no more."""
        attributes: list[Attribute] = []
        if request.tools and self._fixed_tokens.is_new(call.tenant, found.session_id, request.tools):
            attributes.append(Attribute(digest=tokens.content_digest(request.tools), kind="tools", raw=request.tools))
        session = found.session
        key = idempotency_key(call.header_map)
        # Without a reply in it, a request under Tersely's own id is no more than what it adds.
        is_appended = found.is_delta or (found.source == "header" and not named and not arrival.has_replies)
        is_open = session is None or not arrival.reply_chains()
        return RequestWrite(
            tenant=call.tenant,
            session_id=found.session_id,
            create=None
            if session
            else NewSession(
                parent=found.parent,
                client_id=clients.client_ids(call.header_map, request.ids).id,
                spare_id=found.fallback_id,
            ),
            mode="append" if is_appended else "full",
            dialect=self._dialect.name,
            incoming=arrival.identities,
            raws=[message.raw for message in arrival.messages],
            size=len(call.body),
            tokens=(),
            decision=found.decision,
            hidden_parts=said,
            session=session,
            now=now,
            attributes=attributes,
            spill=partial(spilled, arrival.messages),
            open_chain=arrival.head_chain if is_open and not (found.is_delta or named) else None,
            referenced=named,
            replaces_instructions=is_appended and any(incoming.is_instruction for incoming in arrival.identities),
            strategy=compact_setting(call.options.strategy),
            epoch_policy=compact_setting(call.options.epoch),
            key=key,
            key_digest=arrival.question_digest if key is not None else b"",
            exchange=self._new_id(),
            title=_title(arrival) if session is None or not session.turns else None,
        )

    def _label(
        self, call: Call, found: SessionMatch, recipe: ContextConfig, built: BuiltContext | None, *, is_own_body: bool
    ) -> ContextLabels:
        labels = ContextLabels(
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

    async def reduce(self, call: Call, prepared: PreparedCall, overflowed: Overflow) -> PreparedCall | None:
        """The same call with a smaller context; None when none can be made."""
        prepared = prepared.whole
        if prepared.history.overflows >= overflow_tries(prepared.recipe.strategy):
            return None
        around = prepared.around
        if overflowed.limit:
            reserve = prepared.request.max_tokens
            window = max(overflowed.limit // 4, overflowed.limit - (reserve or overflowed.limit // 8))
            ratio = self._calibrations.ratio(prepared.request.model)
            around = replace(around, window=int(window / ratio))
        try:
            history = await after_overflow(
                self._database, call.tenant, prepared.found, prepared.history, prepared.recipe, around
            )
        except StoreUnavailable:
            return None
        before = prepared.built.context.report.tokens_after if prepared.built else None
        less = await self.rebuild(call, replace(prepared, around=around, history=history))
        if less is None or less.built is None:
            return None
        return less if before is None or less.built.context.report.tokens_after < before else None

    async def rebuild(self, call: Call, prepared: PreparedCall) -> PreparedCall | None:
        """The same call with a context of the history that it has now; None when none can be built."""
        size = _work_of(call, prepared.found)
        built = await run_in_thread_if_large(
            size, self._build, prepared.history, prepared.recipe, prepared.around, prepared.request.model
        )
        if built is None:
            return None
        labels = self._label(call, prepared.found, prepared.recipe, built, is_own_body=False)
        labels.overhead_ms = prepared.labels.overhead_ms
        kinds = kinds_shown(built.context.messages, known=prepared.recipe.hidden_tags)
        anew = replace(prepared, built=built, labels=labels, keeper="tersely", shown_kinds=kinds)
        composed = await run_in_thread_if_large(size, self._compose_again, call, anew)
        # What was called already is answered, whatever is offered now.
        tools = composed.tools | (prepared.tools if prepared.extra else frozenset())
        return replace(
            anew, body=composed.body, strip_usage=composed.strip_usage, tools=tools, sources=composed.sources
        )


def _title(arrival: IncomingHistory) -> str | None:
    """The first words of the user."""
    first = next((message.text for message in arrival.messages if message.starts_turn and message.text.strip()), None)
    return None if first is None else title_of(first)


def own_sources(arrival: IncomingHistory, found: SessionMatch) -> list[Source]:
    """The sources of a request that goes out with its own messages."""
    return [
        Source(message.raw, placed.seq, FULL, "" if incoming.is_link else INSTRUCTIONS)
        for message, incoming, placed in zip(arrival.messages, arrival.identities, found.decision.placed, strict=True)
    ]


def _work_of(call: Call, found: SessionMatch) -> int:
    """About how many bytes a context is made of: the body, or what is stored where the body brings only what is new."""
    return max(len(call.body), len(found.rows) * ROW_SIZE)


def _not_named(offers: tuple[ToolOffer, ...], tools: bytes, others: frozenset[str]) -> tuple[ToolOffer, ...]:
    """The offers without those whose names are taken by tools of the client; ``others``: beside its list."""
    if not others and b"\\u" not in tools and not any(offer.name.encode() in tools for offer in offers):
        return offers
    theirs = tool_names(tools) | others
    return tuple(offer for offer in offers if offer.name not in theirs)


def _shows_hidden(found: SessionMatch) -> bool:
    """Whether the request carries what was dropped, taken back or removed."""
    return any(placed.turn > 0 and placed.status != "live" for placed in found.decision.placed)


def _must_call(request: Request) -> bool:
    """Whether the client says that the model has to call a tool, or which."""
    choice = request.tool_choice.lower()
    return choice not in {b"", b"null"} and b"auto" not in choice and b"none" not in choice
