"""Put a dialect together from the modules of its package. Every package has the same modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tersely.dialects.dialect import (
    Dialect,
    ErrorDescription,
    HistoryMember,
    ReplySplitter,
    RequestReader,
    RequestWriter,
    StreamEvents,
    StreamOpener,
    ToolOffer,
    Usage,
)
from tersely.dialects.tool_rounds import Rounds
from tersely.dialects.undescribed import split_safely
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.messages import Message, Role

WHOLE = HistoryMember()


class ReaderModule(Protocol):
    """The module ``read``: from the wire to the domain."""

    @property
    def read_request(self) -> RequestReader: ...
    @property
    def read_message(self) -> Callable[[bytes], Message]: ...
    @property
    def read_reply(self) -> Callable[[bytes], Message]: ...
    @property
    def read_usage(self) -> Callable[[bytes], Usage]: ...


class WriterModule(Protocol):
    """The module ``write``: from the domain to the wire."""

    @property
    def write_request(self) -> RequestWriter: ...
    @property
    def write_text(self) -> Callable[[Role, str], bytes]: ...
    @property
    def write_message(self) -> Callable[[Message], bytes]: ...
    @property
    def as_input(self) -> Callable[[bytes], bytes]: ...
    @property
    def as_reply(self) -> Callable[[bytes], bytes]: ...
    @property
    def restore_reply(self) -> Callable[[bytes, bytes], bytes]: ...
    @property
    def with_text(self) -> Callable[[bytes, str | None], bytes]: ...
    @property
    def with_results(self) -> Callable[[bytes, Mapping[str, str]], bytes]: ...
    @property
    def with_prefix(self) -> Callable[[bytes, str], bytes]: ...
    @property
    def error_body(self) -> Callable[[ErrorDescription], bytes]: ...
    @property
    def error_event(self) -> Callable[[bytes], bytes]: ...


class ToolsModule(Protocol):
    """The module ``tools``: offers of Tersely's own tools."""

    @property
    def add_tools(self) -> Callable[[bytes, Sequence[ToolOffer]], bytes]: ...
    @property
    def forbid_tools(self) -> Callable[[bytes], bytes]: ...
    @property
    def requires_call(self) -> Callable[[bytes], bool]: ...


class StreamModule(Protocol):
    """The module ``stream``: replies that are streamed."""

    @property
    def ReplyStream(self) -> StreamOpener: ...  # noqa: N802 - a class, or a function that makes one


class WholeModule(Protocol):
    """The module ``whole``: replies that are not streamed."""

    @property
    def split_reply(self) -> ReplySplitter: ...


def assemble(
    name: DialectName,
    *,
    read: ReaderModule,
    write: WriterModule,
    tools: ToolsModule,
    stream: StreamModule,
    whole: WholeModule,
    rounds: Rounds,
    streaming: StreamEvents,
    history: HistoryMember = WHOLE,
) -> Dialect:
    """Return the dialect of a package's modules."""
    return Dialect(
        name=name,
        read_request=read.read_request,
        read_message=read.read_message,
        read_reply=read.read_reply,
        read_usage=read.read_usage,
        write_request=write.write_request,
        write_text=write.write_text,
        write_message=write.write_message,
        as_input=write.as_input,
        as_reply=write.as_reply,
        restore_reply=write.restore_reply,
        with_text=write.with_text,
        with_results=write.with_results,
        with_prefix=write.with_prefix,
        add_tools=tools.add_tools,
        forbid_tools=tools.forbid_tools,
        requires_call=tools.requires_call,
        error_body=write.error_body,
        error_event=write.error_event,
        open_stream=stream.ReplyStream,
        split_reply=split_safely(whole.split_reply),
        rounds=rounds,
        streaming=streaming,
        history=history,
    )


def read_each(read: Callable[[bytes], Message]) -> Callable[[Sequence[bytes]], Sequence[Message]]:
    """Return a reader of elements each of which is a message."""
    return lambda raws: [read(raw) for raw in raws]
