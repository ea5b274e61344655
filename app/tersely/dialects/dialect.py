"""The interface of a dialect, and the values that it exchanges with its users. No wire format is known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tersely.dialects.tool_rounds import Rounds
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.messages import Message, Role
from tersely.domain.models import takes_instructions
from tersely.domain.text.tags import NOTHING, TagKinds


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request. ``tools``, ``tool_choice`` and ``response_format`` are verbatim JSON, empty when absent.

    ``response_format`` is one that constrains the reply's text. ``is_text``: the reply is text, not sound or an image.
    ``unreadable`` says why the messages could not be parsed; then ``messages`` is empty, and the request is forwarded
    or, if it names its session, refused. ``include_usage``: the client asked for the usage of a stream. ``max_tokens``
    limits the reply.

    ``ids`` are members by which a client names its own sessions, by name. ``reply_id`` and ``conversation`` reference a
    history that the request does not contain and that the provider may have stored. ``is_stored``: the provider is to
    store the reply. ``takes_tools``: Tersely may add tools, and make the reply in rounds.
    """

    model: str
    messages: tuple[Message, ...]
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    tools: bytes = b""
    tool_choice: bytes = b""
    response_format: bytes = b""
    is_text: bool = True
    takes_tools: bool = True
    stop: bytes = b""
    max_tokens: int | None = None
    ids: Mapping[str, str] = msgspec.field(default_factory=dict)
    reply_id: str = ""
    conversation: str = ""
    is_stored: bool = True
    unreadable: str | None = None

    @property
    def references_history(self) -> bool:
        """Return whether the request references its history instead of sending it."""
        return bool(self.reply_id or self.conversation)

    @property
    def takes_additions(self) -> bool:
        """Return whether Tersely may add instructions and tools to the request.

        A tag would break a structured reply, and so would the text of two rounds.
        """
        return self.is_text and not self.response_format and takes_instructions(self.model)


HOUR_WRITES = 4
"""What a token that is written to the cache for an hour counts in `Usage.written`, the most of any. A token that the
cache keeps for five minutes costs 1.25 times as much as plain input, one that it keeps for an hour 2 times: the
surcharge of the second is that of four of the first (Anthropic's documentation, "Prompt caching").
"""


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens as the provider reports them; None if it does not. ``cached`` is part of ``input``.

    ``written`` are the tokens of ``input`` that were written to the provider's cache. Tokens that it keeps for longer
    than usual count more than once: as many times as their surcharge is higher.
    """

    input: int | None = None
    cached: int | None = None
    output: int | None = None
    written: int | None = None


class ReplyChoice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice of a reply, in wire form: the model's view and the client's view of the message.

    ``terse`` are the contents of the stripped tags, ``state`` the last stripped state block. ``finish_reason`` is empty
    when the reply broke off.
    """

    index: int
    model_message: bytes
    client_message: bytes
    terse: tuple[str, ...] = ()
    state: str | None = None
    finish_reason: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply. ``usage`` and ``error`` are verbatim JSON, empty if absent.

    In a reply of several ``rounds`` ``usage`` is the sum, ``last_usage`` the last one's, ``lacks_last_usage``: the sum
    is that of the earlier ones, of which ``unreported_rounds`` reported none. ``unread``: the body or event data that
    could not be parsed (`tersely.dialects.undescribed`). ``is_done``: the provider ended the reply by its protocol (a
    stream: the end mark was seen). ``container``: the id of the container in which the provider ran code, unless a
    choice names it.
    """

    id: str = ""
    model: str = ""
    choices: tuple[ReplyChoice, ...] = ()
    usage: bytes = b""
    last_usage: bytes = b""
    lacks_last_usage: bool = False
    unreported_rounds: int = 0
    error: bytes = b""
    is_done: bool = False
    unread: tuple[bytes, ...] = ()
    container: str = ""
    rounds: int = 1

    @property
    def is_complete(self) -> bool:
        """True if a streamed reply ended by its protocol."""
        return not self.error and (self.is_done or all(choice.finish_reason for choice in self.choices))


NO_REPLY = Reply()
"""Stands for a reply that the host did not give."""


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's report that the input is too large for the model.

    ``limit`` and ``needed`` are tokens, where the text has them; ``needed`` is the whole request.
    """

    limit: int | None = None
    needed: int | None = None


class ToolOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of Tersely's own as it is offered to a model. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, object]


class ResponseRestorer(Protocol):
    """Restores a reply's body for its client.

    ``message``: the message that the client was given (None: unchanged; empty: unchanged but for calls of ``tools``).
    ``usage``: the usage of all rounds, ``finish``: why the last one ended (empty: unchanged). ``instructions`` and
    ``tools`` (name -> description) were added to its request and are removed. Raises `ValueError` for a body that is no
    reply.
    """

    def __call__(
        self,
        body: bytes,
        message: bytes | None,
        *,
        instructions: Sequence[str],
        tools: Mapping[str, str],
        usage: bytes = b"",
        finish: str = "",
    ) -> bytes: ...


class ReplyReader(Protocol):
    """A reply's stream on its way to the client."""

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that go to the client now."""

    def close(self) -> bytes:
        """End the stream; return the bytes that still go to the client."""

    @property
    def reply(self) -> Reply:
        """The reply so far; complete after ``close``."""


class RequestReader(Protocol):
    """Reads a request body; see the dialect's ``read_request``."""

    def __call__(self, body: bytes) -> Request:
        """Read a request."""


class RequestPatch(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of a request. Each dialect applies the parts that its format knows.

    ``messages`` in wire form replace the client's. ``instructions`` is Tersely's own text for the model.
    ``include_usage``: ask for the usage of a stream, where the provider reports it only then. ``breakpoints`` are
    indices of ``messages`` after which a prompt cache is worthwhile (ends of head and tail), for providers that need
    marks.
    """

    messages: Sequence[bytes]
    instructions: str | None = None
    include_usage: bool = False
    breakpoints: Sequence[int] = ()


class RequestWriter(Protocol):
    """Patches a request body; see the dialect's ``write_request``."""

    def __call__(self, body: bytes, patch: RequestPatch) -> bytes:
        """Return the body with other messages, everything else verbatim."""


class ClientView(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of a reply for its client. Each dialect applies the parts that its format knows.

    ``tags`` are stripped from the text. ``strip_usage``: the stream's usage is removed, because only Tersely asked for
    it. ``own_request``: the client's request if another one went upstream, for replies that repeat their request.
    """

    tags: TagKinds = NOTHING
    strip_usage: bool = False
    own_request: bytes = b""


UNCHANGED = ClientView()
"""The client sees the reply as the provider sent it."""


class StreamOpener(Protocol):
    """Makes a ``ReplyReader``."""

    def __call__(self, view: ClientView) -> ReplyReader:
        """Open a stream."""


class ReplySplitter(Protocol):
    """Reads a reply that is not streamed; see the dialect's ``split_reply``."""

    def __call__(self, body: bytes, view: ClientView) -> tuple[bytes, Reply]:
        """Return the body for the client, and the reply."""


class ErrorDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An error in OpenAI's terms; ``retry_after`` in seconds. Each dialect writes the parts that its format knows."""

    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None


class StreamEvents(msgspec.Struct, frozen=True, kw_only=True):
    """The events that begin and end the streams of a dialect, and the ones that Tersely may insert.

    ``heartbeat``: an event without meaning; empty: the clients accept none. The first line of the last event begins
    with one of ``end_marks``; ``end_texts`` are searched for first, one of them is in each mark. ``is_mark_whole``:
    that line is the whole event. If the last event is not recognised by its first line, it or an event before it
    contains ``finish_key``. ``preamble``: beginnings of events before any content. ``reply_key``: a key of every reply
    that is not streamed. ``has_arrays``: a stream may be a JSON array. ``is_data_only``: clients fail at comments and
    at fields other than ``data``, so these are not forwarded.
    """

    heartbeat: bytes = b""
    end_marks: tuple[bytes, ...] = ()
    end_texts: tuple[bytes, ...] = ()
    is_mark_whole: bool = False
    finish_key: bytes = b""
    preamble: tuple[bytes, ...] = ()
    reply_key: bytes = b""
    has_arrays: bool = False
    is_data_only: bool = False


class ItemReferences(msgspec.Struct, frozen=True, kw_only=True):
    """A dialect's references to items that the provider stores: see `openai_responses.stored_history`.

    A body without ``mark`` contains no reference.
    """

    mark: bytes
    referenced_ids: Callable[[bytes], list[str]]
    with_items: Callable[[bytes, Mapping[str, bytes]], bytes]
    items_by_id: Callable[[bytes], dict[str, bytes]]


def _itself(raw: bytes) -> Sequence[bytes]:
    return (raw,)


def _nothing(_: Sequence[bytes]) -> Sequence[Message]:
    return ()


class HistoryMember(msgspec.Struct, frozen=True, kw_only=True):
    """The array in which the history of a request stands, for requests that only append to an earlier one.

    ``path`` names the members that lead to it; without one, requests are always read whole. ``read`` reads the
    elements behind those of the earlier request, of which the first ones repeat its reply; it raises
    ``InvalidRequest`` where they are not written as they came. ``elements`` are those that a message is written as.

    ``reply_id`` and ``conversation`` are the members with which a request references its history instead; without such
    members, none does. A string in place of the array is one message: ``text_element`` returns its element.
    ``varying`` is a member beside the array that clients change with each call, and that nothing here reads.
    ``guides_writing``: messages are written as those of the array show, so they need a body that has these.
    """

    path: tuple[str, ...] = ()
    read: Callable[[Sequence[bytes]], Sequence[Message]] = _nothing
    elements: Callable[[bytes], Sequence[bytes]] = _itself
    reply_id: str = ""
    conversation: str = ""
    text_element: Callable[[bytes], bytes] | None = None
    varying: str = ""
    guides_writing: bool = False


def _is_never(_: bytes) -> bool:
    return False


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A wire format: the functions of its modules ``read``, ``write`` and ``stream`` under one name."""

    name: DialectName
    read_request: RequestReader
    read_message: Callable[[bytes], Message]
    read_reply: Callable[[bytes], Message]
    """Never fails: see `tersely.dialects.undescribed`."""
    read_usage: Callable[[bytes], Usage]
    write_request: RequestWriter
    write_text: Callable[[Role, str], bytes]
    write_message: Callable[[Message], bytes]
    as_input: Callable[[bytes], bytes]
    as_reply: Callable[[bytes], bytes]
    restore_reply: Callable[[bytes, bytes], bytes]
    with_text: Callable[[bytes, str | None], bytes]
    with_results: Callable[[bytes, Mapping[str, str]], bytes]
    with_prefix: Callable[[bytes, str], bytes]
    add_tools: Callable[[bytes, Sequence[ToolOffer]], bytes]
    forbid_tools: Callable[[bytes], bytes]
    requires_call: Callable[[bytes], bool]
    """Whether a request's ``tool_choice`` requires that the model calls a tool."""
    error_body: Callable[[ErrorDescription], bytes]
    """The body of an error response in the dialect's own shape."""
    error_event: Callable[[bytes], bytes]
    open_stream: StreamOpener
    split_reply: ReplySplitter
    rounds: Rounds | None = None
    """None: models of this dialect are offered no tools of ours."""
    without_history: Callable[[bytes], bytes] = bytes
    """A request without the history of the provider's own that it refers to, for a context that brings the whole."""
    lacks_history: Callable[[int, bytes], bool] | None = None
    """Whether a refusal (status, body) says that the provider has no such history as the request named; None: clients
    send theirs."""
    is_per_request: Callable[[bytes], bool] = _is_never
    """Whether a message holds for its request alone, so that no history carries it."""
    history: HistoryMember = HistoryMember()
    references: ItemReferences | None = None
    """None: clients send what they have, and refer to nothing."""
    continues_prefill: bool = True
    """Whether a model may continue the assistant message that a request ends with: clients then send both as one."""
    restore_response: ResponseRestorer | None = None
    """A reply that the provider is asked for again, as its client was given it; None: it is asked for none."""
    streaming: StreamEvents
