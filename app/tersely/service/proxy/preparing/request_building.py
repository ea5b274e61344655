"""The fourth step of a call: write the body that goes to the model host, and what is to be stored of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import structs

from tersely.dialects.clients import known as clients
from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect, RequestPatch
from tersely.dialects.wire.array_member import find_array
from tersely.domain.history.sessions import title_of
from tersely.domain.text.tags import NOTHING, TagKinds
from tersely.service.common import tokens
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.context.building import BuiltContext
from tersely.service.context.context_config import ContextConfig, instructions_in, offers_in
from tersely.service.context.context_configs import compact_setting
from tersely.service.context.rendering import RenderedMessages, render_messages
from tersely.service.context.sent_contexts import ADDED, FULL, INSTRUCTIONS, MessageSource
from tersely.service.context.shown_tags import kinds_shown
from tersely.service.proxy.call.call import ContextLabels
from tersely.service.proxy.preparing.context_building import CallContext, work_size
from tersely.service.proxy.preparing.stages import MatchedCall, PreparedCall
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.commit.records import Attribute, HistoryOwner, NewSession, RequestWrite
from tersely.store.history.artifacts import spilled
from tersely.strategies.presets import strategy_name


class _UpstreamBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body for the model host; see `PreparedCall` for its members."""

    body: bytes
    strip_usage: bool = False
    tools: frozenset[str] = frozenset()
    sources: Sequence[MessageSource] | None = None


class RequestBuilder:
    """Builds the requests of one dialect."""

    def __init__(self, dialect: Dialect, *, fixed_tokens: tokens.FixedTokens, new_id: Callable[[], str]) -> None:
        self._dialect = dialect
        self._fixed_tokens = fixed_tokens
        self._new_id = new_id

    async def build_request(self, matched: MatchedCall, context: CallContext) -> PreparedCall:
        """Write the body of a call, and what is to be stored of its request."""
        size = work_size(matched)
        matched = structs.replace(matched, loaded=context.loaded)
        call, config, built = matched.call, matched.config, context.built

        def work() -> tuple[_UpstreamBody, RequestWrite]:
            return self._write_body(matched, built), self._request_write(matched, context)

        upstream, write = await run_in_thread_if_large(size, work)
        is_own_body = upstream.body is call.body
        return PreparedCall(
            call=call,
            request=matched.request,
            history=matched.history,
            hints=matched.hints,
            started=matched.started,
            match=matched.match,
            config=config,
            budget=matched.budget,
            loaded=matched.loaded,
            resolved=matched.resolved,
            is_at_host=matched.is_at_host,
            live=matched.live,
            expand=matched.expand,
            built=built,
            body=upstream.body,
            write=write,
            labels=_labels(matched, built, is_own_body=is_own_body),
            sources=upstream.sources,
            strip_usage=upstream.strip_usage,
            tools=upstream.tools,
            shown_tags=_shown_tags(config, built),
            history_owner=_history_owner(matched, is_own_body=is_own_body),
            client=client_name(call.header_map) or None,
        )

    async def rebuild(self, prepared: PreparedCall, context: CallContext) -> PreparedCall | None:
        """Write the body again with another context; None if there is no context."""
        built = context.built
        if built is None:
            return None
        labels = _labels(prepared, built, is_own_body=False)
        anew = structs.replace(
            prepared,
            loaded=context.loaded,
            built=built,
            labels=structs.replace(labels, overhead_ms=prepared.labels.overhead_ms),
            history_owner="tersely",
            shown_tags=_shown_tags(prepared.config, built),
        )
        upstream = await run_in_thread_if_large(work_size(prepared), self._write_body_of_round, anew)
        # Tools that were called already stay known, whatever is offered now.
        tools = upstream.tools | (prepared.tools if prepared.round_messages else frozenset())
        return structs.replace(
            anew, body=upstream.body, strip_usage=upstream.strip_usage, tools=tools, sources=upstream.sources
        )

    def continue_with_tool_results(
        self, prepared: PreparedCall, messages: Sequence[bytes], *, is_last_round: bool
    ) -> PreparedCall:
        """Write the body of the next round: the context, and behind it the calls and results of the rounds so far."""
        bodies = (*prepared.earlier_bodies, prepared.body)
        following = structs.replace(
            prepared.whole, round_messages=tuple(messages), is_last_round=is_last_round, earlier_bodies=bodies
        )
        upstream = self._write_body_of_round(following)
        return structs.replace(following, body=upstream.body, sources=upstream.sources)

    def _write_body_of_round(self, prepared: PreparedCall) -> _UpstreamBody:
        return self._write_body(prepared, prepared.built, prepared.round_messages, is_last_round=prepared.is_last_round)

    def _write_body(
        self,
        matched: MatchedCall,
        built: BuiltContext | None,
        round_messages: Sequence[bytes] = (),
        *,
        is_last_round: bool = False,
    ) -> _UpstreamBody:
        """Patch the client's body. O(size of the request).

        ``is_last_round``: the model may call no tool any more; if the client requires a call, none of Tersely's tools.
        """
        call, request, config = matched.call, matched.request, matched.config
        is_complete = not (request.references_history or matched.match.is_delta)
        if built is None or (config.is_unchanged and is_complete):
            return _UpstreamBody(body=call.body)
        asks_usage = request.stream and not request.include_usage and not config.is_unchanged
        must_call = bool(request.tool_choice) and self._dialect.requires_call(request.tool_choice)
        # Tools come before everything else, so the cached prefix of a prompt depends on them. If the client forces one
        # of its own tools or forbids all, Tersely's stay in the list: the model cannot call them then.
        all_offers = offers_in(built.context.epoch, config)
        offers = () if is_last_round and must_call else all_offers
        instructions = instructions_in(built.context.epoch, config)
        is_verbatim = built.context.is_whole and matched.loaded.is_verbatim and instructions is None
        is_verbatim = is_verbatim and not request.references_history
        if is_verbatim and not (asks_usage or offers or round_messages):
            return _UpstreamBody(body=call.body)
        rendered = self._render(matched, built, round_messages, is_verbatim=is_verbatim)
        # Only the client sets cache breakpoints in a prompt that is its own throughout the epoch: its messages may be
        # sent unchanged at any call.
        is_own = instructions is None and not all_offers and built.context.epoch.cut == 1
        is_own = is_own and not (matched.match.is_delta or request.references_history)
        body = self._without_messages(matched)
        if offers:
            body = self._dialect.add_tools(body, offers)
        body = self._dialect.write_request(
            body,
            RequestPatch(
                messages=rendered.messages,
                instructions=instructions,
                include_usage=asks_usage,
                breakpoints=() if is_own else rendered.breakpoints(),
            ),
        )
        if built.context.must_answer or (is_last_round and not must_call):
            body = self._dialect.forbid_tools(body)
        return _UpstreamBody(
            body=body,
            strip_usage=asks_usage,
            tools=frozenset(offer.name for offer in offers),
            sources=rendered.sources,
        )

    def _without_messages(self, matched: MatchedCall) -> bytes:
        """Return the client's body without its messages: the dialect replaces them, and need not parse them for that.
        Return the whole body where the dialect needs them, or where `find_array` does not find them.
        """
        body, live, history = matched.call.body, matched.live, self._dialect.history
        if matched.request.references_history:
            return self._dialect.without_history(body)
        if history.guides_writing:
            return body
        if live is not None:
            return body[: live.start] + live.suffix
        place = find_array(body, history.path) if history.path else None
        return body if place is None else body[: place[0]] + body[place[1] :]

    def _render(
        self, matched: MatchedCall, built: BuiltContext, round_messages: Sequence[bytes], *, is_verbatim: bool
    ) -> RenderedMessages:
        """Write the messages of a context, or take the client's own, and behind them those of earlier rounds."""
        if is_verbatim:
            rendered = RenderedMessages(
                messages=[message.raw for message in matched.history.messages],
                sources=own_sources(matched.history, matched.match),
            )
        else:
            rendered = render_messages(built.context, self._dialect, matched.loaded, matched.history, matched.match)
        return structs.replace(
            rendered,
            messages=[*rendered.messages, *round_messages],
            sources=[*rendered.sources, *(MessageSource(raw, 0, ADDED, "tool_round") for raw in round_messages)],
        )

    def _request_write(self, matched: MatchedCall, context: CallContext) -> RequestWrite:
        """Return what is to be stored of a request. O(number of messages)."""
        call, request, history, match = matched.call, matched.request, matched.history, matched.match
        referenced = matched.resolved.reply if matched.resolved else None
        session = match.session
        attributes: list[Attribute] = []
        if request.tools and self._fixed_tokens.is_new(call.tenant, match.session_id, request.tools):
            attributes.append(Attribute(digest=tokens.content_digest(request.tools), kind="tools", raw=request.tools))
        # A request without a reply, under Tersely's own session id, carries only what it adds.
        is_appended = match.is_delta or (match.source == "header" and not referenced and not history.has_replies)
        is_open = session is None or not history.reply_chains()
        key = matched.hints.key
        return RequestWrite(
            tenant=call.tenant,
            session_id=match.session_id,
            create=None
            if session
            else NewSession(
                parent=match.parent,
                client_id=clients.client_ids(call.header_map, request.ids).id,
                spare_id=match.fallback_id,
            ),
            mode="append" if is_appended else "full",
            dialect=self._dialect.name,
            incoming=history.identities,
            raws=[message.raw for message in history.messages],
            size=len(call.body),
            tokens=(),
            decision=match.decision,
            hidden_parts=context.hidden_parts,
            session=session,
            now=matched.started,
            attributes=attributes,
            spill=partial(spilled, history.messages),
            open_chain=history.head_chain if is_open and not (match.is_delta or referenced) else None,
            referenced=referenced,
            replaces_instructions=is_appended and any(incoming.is_instruction for incoming in history.identities),
            strategy=compact_setting(call.options.strategy),
            epoch_policy=compact_setting(call.options.epoch),
            key=key,
            key_digest=history.question_digest if key is not None else b"",
            exchange=self._new_id(),
            title=_title(history) if session is None or not session.turns else None,
            whole=matched.whole_request,
        )


def own_sources(history: IncomingHistory, match: SessionMatch) -> list[MessageSource]:
    """Return the sources of a request that is sent with its own messages."""
    return [
        MessageSource(message.raw, placed.seq, FULL, "" if incoming.is_link else INSTRUCTIONS)
        for message, incoming, placed in zip(history.messages, history.identities, match.decision.placed, strict=True)
    ]


def _shown_tags(config: ContextConfig, built: BuiltContext | None) -> TagKinds:
    """Return the kinds of tags that the request shows to the model. An unchanged one shows what the client knows."""
    if built is None or config.is_unchanged:
        return NOTHING
    return kinds_shown(built.context.messages, known=config.hidden_tags)


def _labels(matched: MatchedCall, built: BuiltContext | None, *, is_own_body: bool) -> ContextLabels:
    report = built.context.report if built is not None else None
    return ContextLabels(
        context="passthrough" if is_own_body else "built",
        strategy=strategy_name(matched.config.strategy),
        session_id=matched.match.session_id,
        source=matched.match.source,
        epoch=report.epoch if report else None,
        tokens_before=report.tokens_before if report else None,
        tokens_after=report.tokens_after if report else None,
    )


def _history_owner(matched: MatchedCall, *, is_own_body: bool) -> HistoryOwner:
    """Return who has the history up to the reply once the call is done."""
    request, resolved = matched.request, matched.resolved
    if matched.is_at_host and resolved is not None:
        return resolved.history_owner if resolved.history_owner == "host" or request.is_stored else "tersely"
    is_whole = is_own_body and not (matched.match.is_delta or request.references_history)
    # Tags that the client is not shown would stay in the host's history.
    is_whole = is_whole and matched.config.hidden_tags == NOTHING
    return "both" if is_whole and request.is_stored else "tersely"


def _title(history: IncomingHistory) -> str | None:
    """Return the first words of the user."""
    first = next((message.text for message in history.messages if message.starts_turn and message.text.strip()), None)
    return None if first is None else title_of(first)
