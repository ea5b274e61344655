"""Limits what tenants can reach in a provider account that they share, the operator's.

Routes outside the list are refused before anything is sent upstream. Ids in a path or a body must be the tenant's own:
those of replies and items that Tersely relayed to it, and of objects that it created. The response does not show
whether a refused id exists.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from tersely.dialects.account_ids import AccountId, brought, cited, find_account_ids, find_named_ids
from tersely.dialects.account_routes import AllowedRoute, Passthrough, Rule, find_route, rules_for
from tersely.dialects.dialect import UNCHANGED, Dialect, Reply
from tersely.domain.errors import Forbidden, InvalidRequest, NotFound, StoreUnavailable
from tersely.domain.messages import Dialect as DialectName
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.call.call import Call, ProxyResponse
from tersely.service.proxy.sending.sender import EVENT_STREAM, JSON
from tersely.service.proxy.streams.client_stream import ClientStream
from tersely.store.db.connection import Database
from tersely.store.ops import provider_ids

_log = logging.getLogger(__name__)

CHAT_PATH = "/v1/chat/completions"
# Ids that this process knows to be a tenant's: a conversation that continues needs no query.
MAX_TRUSTED = 100_000
# Ids in a body or a reply. Histories name one or two items per message.
MAX_IDS = 100_000
MAX_ID = 512
# The largest reply that is searched for ids (bytes).
MAX_READ = 32 * 1024 * 1024
# A streamed reply has its id within so many bytes.
ID_WITHIN = 64 * 1024
# The endings of item types that carry the output of a caller's tool.
_RESULT = "_output"


class AccountAccess:
    """Guards the provider accounts of the operator."""

    def __init__(
        self,
        database: Database,
        dialects: Mapping[DialectName, Dialect],
        passthrough: Passthrough,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        """``dialects``: those whose upstream is called with the operator's key; every other one is not restricted."""
        self._database = database
        self._dialects = dialects
        self._passthrough = passthrough
        self._rules: dict[DialectName, Sequence[Rule]] = {name: rules_for(name, passthrough) for name in dialects}
        self._clock = clock
        self._trusted: OrderedDict[tuple[str, str], None] = OrderedDict()

    def check_route(self, dialect: DialectName, method: str, raw_path: str) -> AllowedRoute | None:
        """Return the route of a request; None if the dialect is not restricted. Raises `Forbidden`."""
        rules = self._rules.get(dialect)
        if rules is None:
            return None
        route = find_route(rules, dialect, method, raw_path)
        if route is None:
            raise Forbidden(
                "this route is not open to tenants of the operator's provider account "
                "(the operator can add it: TERSELY_PASSTHROUGH)"
            )
        return route

    async def check_ids(self, dialect: DialectName, call: Call, route: AllowedRoute, path: str) -> list[str]:
        """Check that the ids in path and body are the tenant's. Return the marks that `watch` moves to the session.

        Ids that the caller gives to items of its own are stored as such before the host sees them.

        Raises `NotFound` with the member of the body, `InvalidRequest` for a body in which ids cannot be looked for,
        `StoreUnavailable` when the database cannot say whose they are.
        """
        # A session may have been deleted elsewhere, and with it the marks by which its listed items are judged.
        await self._check(call.tenant, [AccountId(id=name, field="") for name in route.ids], is_fresh=route.lists)
        if not call.body:
            return []
        if call.is_compressed:
            raise InvalidRequest("a compressed body cannot be checked: send it without Content-Encoding")
        if route.takes_forms and call.header_map.get("content-type", "").lower().lstrip().startswith("multipart/"):
            return []
        if dialect == "openai_chat" and path != CHAT_PATH:
            dialect = "openai_responses"  # their ids may stand in every other body of this provider
        named = await run_in_thread_if_large(len(call.body), find_account_ids, dialect, call.body)
        owned = [each for each in named if not each.is_brought]
        await self._check(call.tenant, owned)
        chosen = [each.id for each in named if each.is_brought]
        return await self._mark_brought(call.tenant, chosen, [each.id for each in owned])

    async def _mark_brought(self, tenant: str, ids: Sequence[str], owned: Sequence[str]) -> list[str]:
        """Store which item ids are of the caller's own choice, unless they are the tenant's already; the marks.

        A host may list the items of the replies ``owned`` again, so the marks of their sessions are among them.
        """
        if len(ids) > MAX_IDS:
            raise InvalidRequest(f"the request names more than {MAX_IDS} ids")
        named = [name for name in dict.fromkeys(ids) if len(name) <= MAX_ID and name.isprintable()]
        new = [name for name in named if (tenant, name) not in self._trusted]
        if not new and not owned:
            return []
        async with self._database.transaction(tenant) as connection:
            known = await provider_ids.known(connection, tenant, new) if new else set()
            marks = [brought(name) for name in new if name not in known]
            if owned:
                marks += await provider_ids.of_sessions(connection, tenant, owned)
            if marks:
                await provider_ids.add(connection, tenant, marks, self._clock())
        self.trust(tenant, known)
        return list(dict.fromkeys(marks))

    async def _check(self, tenant: str, named: Sequence[AccountId], *, is_fresh: bool = False) -> None:
        """Raise `NotFound` unless all ids are the tenant's. ``is_fresh``: as the database has it now."""
        unknown = [each for each in named if not self._passthrough.is_shared(each.id)]
        if not is_fresh:
            unknown = [each for each in unknown if all((tenant, name) not in self._trusted for name in _names(each))]
        if not unknown:
            return
        names = {name for each in unknown for name in _names(each)}
        usable = [name for name in names if len(name) <= MAX_ID and name.isprintable()]
        if len(names) > MAX_IDS:
            raise InvalidRequest(f"the request names more than {MAX_IDS} ids")
        known: set[str] = set()
        if usable:
            async with self._database.reading(tenant) as connection:
                known = await provider_ids.known(connection, tenant, usable)
        self.trust(tenant, known)
        for each in unknown:
            if known.isdisjoint(_names(each)):
                shown = each.id[:MAX_ID].encode("ascii", "backslashreplace").decode()
                raise NotFound(
                    f"this tenant has no {shown!r}: a request may name only objects that were made through Tersely "
                    "with a key of the same tenant (an item may be sent without its id)",
                    field=each.field or None,
                )

    def trust(self, tenant: str, ids: Iterable[str]) -> None:
        """Remember in this process that ``ids`` are the tenant's."""
        for name in ids:
            self._trusted[tenant, name] = None
            self._trusted.move_to_end((tenant, name))
        while len(self._trusted) > MAX_TRUSTED:
            self._trusted.popitem(last=False)

    async def watch(
        self, call: Call, answer: ProxyResponse, dialect: DialectName, route: AllowedRoute, marks: Sequence[str]
    ) -> ProxyResponse:
        """Return the response to a call that creates objects, and store their ids as the tenant's; those in a list
        too, if the route is one of a list.

        The ids in a reply of a session are stored with it; the ``marks`` of the call become the session's.
        """
        names = dict(answer.headers)
        session_id = names.get("x-tersely-session")
        if session_id is not None:
            if marks and answer.chunks is not None:
                answer.chunks = self._moving_marks(call.tenant, session_id, marks, answer.chunks)
            elif marks:
                await self._move_marks(call.tenant, session_id, marks)
            return answer
        if not 200 <= answer.status < 300:
            return answer
        kind = names.get("content-type", "").partition(";")[0].strip().lower()
        lists = route.ids if route.lists else None
        read = partial(_made, dialect=dialect, lists=route.lists)
        if answer.chunks is None:
            if kind == JSON:
                made = await run_in_thread_if_large(len(answer.body), read, answer.body)
                await self._remember(call.tenant, made, lists=lists)
        elif kind == EVENT_STREAM:
            answer.chunks = self._watch_stream(call.tenant, answer.chunks, self._dialects[dialect])
        elif kind == JSON:
            answer.chunks = self._watch_body(call.tenant, answer.chunks, read, lists=lists)
        return answer

    async def _moving_marks(
        self, tenant: str, session_id: str, marks: Sequence[str], chunks: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the reply as it comes. Its session is stored at its end."""
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()
        await self._move_marks(tenant, session_id, marks)

    async def _move_marks(self, tenant: str, session_id: str, marks: Sequence[str]) -> None:
        try:
            async with self._database.transaction(tenant) as connection:
                await provider_ids.move_to_session(connection, tenant, session_id, marks)
        except StoreUnavailable as error:
            _log.warning("ids of a client's choice stay with their tenant: %s", error)

    async def _watch_stream(
        self, tenant: str, chunks: AsyncGenerator[bytes, None], dialect: Dialect
    ) -> AsyncGenerator[bytes, None]:
        """Yield the stream as it comes. Store the id of the reply before the client sees it, and those of its items
        before the end.
        """
        stream = ClientStream(dialect, MAX_READ, UNCHANGED)
        first = ""
        try:
            async for chunk in chunks:
                start = 0
                while not start or start < len(chunk):
                    part, start = await stream.feed_part(chunk, start)
                    if not first and stream.size <= ID_WITHIN and (first := stream.reader.reply_so_far().id):
                        await self._remember(tenant, [first])
                    if part:
                        yield part
            rest = await stream.end_round()
            reply = await stream.reply()
            await self._remember(tenant, await run_in_thread_if_large(stream.size, _made_by_stream, reply, dialect))
            if rest := rest + stream.close():
                yield rest
        finally:
            await chunks.aclose()

    async def _watch_body(
        self,
        tenant: str,
        chunks: AsyncGenerator[bytes, None],
        read: Callable[[bytes], list[str]],
        *,
        lists: Sequence[str] | None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes. Store the ids in it before the client sees its end."""
        whole: list[bytes] = []
        held, size = b"", 0
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size <= MAX_READ:
                    whole.append(chunk)
                if held:
                    yield held
                held = chunk
            if size <= MAX_READ:
                made = await run_in_thread_if_large(size, read, b"".join(whole))
                await self._remember(tenant, made, lists=lists)
            if held:
                yield held
        finally:
            await chunks.aclose()

    async def _remember(self, tenant: str, ids: Sequence[str], *, lists: Sequence[str] | None = None) -> None:
        """Store ids as the tenant's. If the database is away, other processes do not know them.

        ``lists`` names the objects whose items the ids are, if the host listed them. Such a list may contain ids that
        the caller chose itself: these are not stored. No id is stored if the database cannot tell which those are: it
        is away, or one of the objects was deleted meanwhile.
        """
        usable = [name for name in ids if 0 < len(name) <= MAX_ID and name.isprintable()][:MAX_IDS]
        unknown = [name for name in usable if (tenant, name) not in self._trusted]
        if not unknown:
            return
        if lists is None:
            self.trust(tenant, unknown)
        try:
            async with self._database.transaction(tenant) as connection:
                if lists is not None:
                    chosen = await provider_ids.known(connection, tenant, list(map(brought, unknown)))
                    unknown = [name for name in unknown if brought(name) not in chosen]
                    listed = [name for name in lists if not self._passthrough.is_shared(name)]
                    if not await provider_ids.known(connection, tenant, listed) >= set(listed):
                        return
                await provider_ids.add(connection, tenant, unknown, self._clock())
            self.trust(tenant, unknown)
        except StoreUnavailable as error:
            _log.warning("ids of a reply were not stored as the tenant's: %s", error)


def _made_by_stream(reply: Reply, dialect: Dialect) -> list[str]:
    """Return the ids of a streamed reply and of its items."""
    made = [reply.id, reply.container]
    for choice in reply.choices:
        made += dialect.references.items_by_id(choice.client_message) if dialect.references else ()
        made += find_named_ids(dialect.name, choice.client_message)
    return made


def _names(named: AccountId) -> tuple[str, ...]:
    """Return the stored names, each of which permits an id."""
    return (named.id, cited(named.id)) if named.is_cited else (named.id,)


def _made(body: bytes, *, dialect: DialectName, lists: bool) -> list[str]:
    """Return the ids of the objects that a reply created: its own and those of its items.

    Items that repeat the caller's input may carry an id of the caller's choice, and do not count here. Of a list
    (``lists``) all items are returned: which ids the caller brought is stored (`brought`).
    """
    name_of = "name" if dialect == "gemini" else "id"
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(reply, dict):
        return []
    own = [
        item
        for item in _objects(reply.get("output"))
        if item.get("role") in (None, "assistant") and not str(item.get("type")).endswith(_RESULT)
    ]
    found = [each.get(name_of) for each in (reply, reply.get("file"), *own) if isinstance(each, dict)]
    if lists:
        listed = _objects(reply.get("data"))
        found += [item.get(name_of) for item in listed]
        found += find_named_ids("openai_responses", json.dumps(listed).encode())
    messages = [json.dumps(choice.get("message")).encode() for choice in _objects(reply.get("choices"))]
    found += [name for message in messages for name in find_named_ids("openai_chat", message)]
    found += find_named_ids("anthropic" if dialect == "anthropic" else "openai_responses", body)
    return [name for name in found if isinstance(name, str)]


def _objects(values: object) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
