"""The rounds of one call: what the model wrote in each, and what of it the client is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tersely.dialects.dialect import NO_REPLY, Dialect, Reply, ReplyChoice
from tersely.dialects.finish_reasons import CUT_OFF, ENDED
from tersely.dialects.tool_rounds import FinishedRounds, add_usage
from tersely.dialects.wire import raw_json
from tersely.domain.messages import Message, ToolCall
from tersely.service.proxy.streams.limited_reader import OVERSIZED

MAX_ROUNDS = 8
"""After so many rounds the model may call no tool any more."""


class HiddenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that the client never sees: a reply of the model with calls of Tersely's tools (``choice``), or a
    result.

    ``raw`` is fit to be sent to a model.
    """

    raw: bytes
    choice: ReplyChoice | None = None


class HiddenMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Hidden messages before a reply, and behind it: the results of its calls of Tersely's tools."""

    before: tuple[HiddenMessage, ...] = ()
    after: tuple[HiddenMessage, ...] = ()


NO_HIDDEN_MESSAGES = HiddenMessages()


class CombinedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of all rounds, under the id that the client knows, and the messages hidden beside it.

    ``client_message`` is the message for the client (empty: none).
    """

    reply: Reply
    hidden: HiddenMessages = NO_HIDDEN_MESSAGES
    client_message: bytes = b""


class RoundTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """The finished rounds of one call, the last one left out. ``tools`` are the names of Tersely's own.

    ``shown`` are the messages of the rounds as the client saw them, ``hidden`` those that the model is sent again.
    ``usage`` is the sum of the rounds, ``last_usage`` that of the newest one that reported any; ``unreported`` is the
    number of rounds that reported none. ``model`` is the newest one that a reply named.
    """

    dialect: Dialect
    tools: frozenset[str]
    reply_id: str = ""
    shown: tuple[bytes, ...] = ()
    hidden: tuple[HiddenMessage, ...] = ()
    usage: bytes = b""
    last_usage: bytes = b""
    unreported: int = 0
    model: str = ""

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return len(self.shown)

    @property
    def is_full(self) -> bool:
        """True if the model may call no further tool."""
        return self.rounds >= MAX_ROUNDS

    @property
    def unfinished(self) -> Reply:
        """The usage of the finished rounds, for a call that ends without a reply."""
        if not self.rounds:
            return NO_REPLY
        return Reply(
            model=self.model,
            usage=self.usage,
            last_usage=self.last_usage,
            lacks_last_usage=bool(self.usage),
            unreported_rounds=self.unreported,
            rounds=self.rounds + 1,
        )

    @property
    def messages(self) -> list[bytes]:
        """The messages that a model is sent behind its context in the next round."""
        return [hidden.raw for hidden in self.hidden]

    @property
    def finished(self) -> FinishedRounds:
        """The usage of the finished rounds, and whether the client was shown text."""
        has_text = any(self.dialect.read_reply(message).text for message in self.shown)
        return FinishedRounds(usage=self.usage, has_text=has_text)

    def own_calls(self, reply: Reply) -> tuple[list[ToolCall], bool]:
        """Return a reply's calls of Tersely's tools, and whether it calls other tools besides."""
        if not (self._may_call(reply) and reply.choices) or self._is_malformed(reply):
            return [], False
        return self._split_calls(reply.choices[0].model_message)

    def calls_to_run(self, reply: Reply) -> tuple[list[ToolCall], bool]:
        """Return a round's calls of Tersely's tools that are to be run, and whether it has other calls.

        A call that is not whole never happened, and so with one that the model is not sent again.
        """
        if not _may_have_whole_calls(reply):
            return [], False
        calls, is_mixed = self.own_calls(reply)
        if not calls or self.is_full:
            return [], is_mixed
        choice = reply.choices[0]
        sent, _ = self._split_calls(self.dialect.as_input(choice.model_message))
        # The answer to a call with bad arguments says what is wrong with them.
        is_ended = choice.finish_reason.lower() in ENDED
        return (sent if is_ended or all(map(_has_object, sent)) else []), is_mixed

    def _split_calls(self, message: bytes) -> tuple[list[ToolCall], bool]:
        clients = self._read(self._without_calls(message)).calls
        left = Counter(clients)  # not by id: hosts give several calls one id, or none
        own: list[ToolCall] = []
        for call in self._read(message).calls:
            if left[call]:
                left[call] -= 1
            else:
                own.append(call)
        return own, bool(clients)

    def _may_call(self, reply: Reply) -> bool:
        """Return whether a reply may call one of Tersely's tools. JSON escapes no character of their names."""
        message = reply.choices[0].model_message if reply.choices else b""
        return b"\\u" in message or any(name.encode() in message for name in self.tools)

    def is_only_round(self, reply: Reply) -> bool:
        """Return whether ``reply`` is the call's first round and surely calls none of Tersely's tools."""
        return not self.shown and not (self.tools and (len(reply.choices) > 1 or self._may_call(reply)))

    def with_round(self, reply: Reply, results: Sequence[bytes]) -> RoundTranscript:
        """Return the transcript with a round in which the model called nothing but Tersely's tools."""
        choice = reply.choices[0]
        called = HiddenMessage(raw=self.dialect.as_input(choice.model_message), choice=choice)
        return replace(
            self,
            reply_id=self.reply_id or reply.id,
            shown=(*self.shown, self._without_calls(choice.client_message)),
            hidden=(*self.hidden, called, *(HiddenMessage(raw=raw) for raw in results)),
            usage=add_usage(self.usage, reply.usage),
            last_usage=reply.usage or self.last_usage,
            unreported=self.unreported + (not self._reports_usage(reply)),
            model=reply.model or self.model,
        )

    def combine(self, last: Reply, results: Sequence[bytes] = ()) -> CombinedReply:
        """Return the whole reply after the ``last`` round; ``results`` are those of its calls of Tersely's tools.

        Calls of Tersely's tools without results are dropped. If the last round has no content, the earlier rounds are
        dropped too, but for the text that the client has seen.
        """
        if not self.tools or (not results and self.is_only_round(last)):
            return CombinedReply(reply=last)
        if self._is_malformed(last):
            return self._combine_malformed(last)
        rounds = self.dialect.rounds
        assert rounds is not None
        choice = last.choices[0] if last.choices else ReplyChoice(index=0, model_message=b"", client_message=b"")
        shown, model = list(self.shown), b""
        if last.choices:
            shown.append(self._without_calls(choice.client_message))
            model = choice.model_message if results else self._without_calls(choice.model_message)
        client = rounds.merge_messages(shown) if shown else b""
        hidden = NO_HIDDEN_MESSAGES
        if self.hidden or results:
            hidden = HiddenMessages(before=self.hidden, after=tuple(HiddenMessage(raw=raw) for raw in results))
        if not self._has_content(model):
            model, hidden = client, NO_HIDDEN_MESSAGES
        whole = replace(choice, model_message=model, client_message=client)
        # A reply without content counts too: the model was sent this context.
        choices = (whole,) if last.choices or self._has_content(client) else ()
        reply = replace(
            last,
            id=self.reply_id or last.id,
            model=last.model or self.model,
            choices=choices,
            usage=add_usage(self.usage, last.usage),
            last_usage=(last.usage or self.last_usage) if self.hidden else b"",
            lacks_last_usage=bool(self.usage) and not self._reports_usage(last),
            unreported_rounds=self.unreported,
            rounds=self.rounds + 1,
        )
        return CombinedReply(reply=reply, hidden=hidden, client_message=client)

    def _combine_malformed(self, last: Reply) -> CombinedReply:
        """Return the whole reply if the last round is of an unknown shape. The client is shown that one unchanged."""
        rounds = self.dialect.rounds
        assert rounds is not None
        choice = last.choices[0]
        reply = replace(
            last,
            id=self.reply_id or last.id,
            usage=add_usage(self.usage, last.usage),
            last_usage=(last.usage or self.last_usage) if self.hidden else b"",
            lacks_last_usage=bool(self.usage) and not self._reports_usage(last),
            unreported_rounds=self.unreported,
            rounds=self.rounds + 1,
        )
        if self.shown:
            shown = rounds.merge_messages(self.shown)
            earlier = replace(choice, model_message=shown, client_message=shown, terse=(), state=None)
            choices = (earlier,) if self._has_content(shown) else ()
            reply = replace(reply, choices=choices, unread=(*last.unread, choice.model_message))
        return CombinedReply(reply=reply, client_message=choice.client_message)

    def _reports_usage(self, reply: Reply) -> bool:
        return bool(reply.usage) and bool(self.dialect.read_usage(reply.usage).input)

    def _without_calls(self, message: bytes) -> bytes:
        assert self.dialect.rounds is not None
        return self.dialect.rounds.without_calls(message, self.tools)

    def _is_malformed(self, reply: Reply) -> bool:
        return bool(reply.choices) and self._read(reply.choices[0].model_message).is_malformed

    def _has_content(self, message: bytes) -> bool:
        return bool(message) and bool(self._read(message).parts)

    def _read(self, message: bytes) -> Message:
        return self.dialect.read_reply(message)


def _may_have_whole_calls(reply: Reply) -> bool:
    if reply.error or not reply.choices:
        return False
    finish = reply.choices[0].finish_reason.lower()
    return (reply.is_done or bool(finish)) and finish not in CUT_OFF and finish != OVERSIZED


def _has_object(call: ToolCall) -> bool:
    """Return whether a call's arguments are a whole JSON object."""
    try:
        return isinstance(raw_json.load(call.arguments.encode("utf-8", "surrogatepass")), dict)
    except ValueError:
        return False
