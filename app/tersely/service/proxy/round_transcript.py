"""What a model said over the rounds of one call, and what of that its client is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tersely.dialects.dialect import Dialect, Reply, ReplyChoice
from tersely.dialects.tool_rounds import add_usage
from tersely.domain.messages import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMessage:
    """A message that the client never sees: what the model said (``choice``) when it called tools of ours, or a result.

    ``raw`` is fit to be sent to a model.
    """

    raw: bytes
    choice: ReplyChoice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMessages:
    """Hidden messages that stand before a reply, and those behind it: results of its calls of ours among others."""

    before: tuple[HiddenMessage, ...] = ()
    after: tuple[HiddenMessage, ...] = ()


NOTHING_BESIDE = HiddenMessages()


class RoundTranscript:
    """The rounds of one call. ``names`` are those of our tools."""

    def __init__(self, dialect: Dialect, names: frozenset[str]) -> None:
        assert dialect.rounds is not None
        self._dialect = dialect
        self._rounds = dialect.rounds
        self._names = names
        self._shown: list[bytes] = []
        self._before: list[HiddenMessage] = []
        self._id = ""
        self.usage = b""
        self.client = b""

    @property
    def rounds(self) -> int:
        """How many there were, the one that is under way left out."""
        return len(self._shown)

    @property
    def extra(self) -> list[bytes]:
        """What a model that is asked again is sent behind its context."""
        return [hidden.raw for hidden in self._before]

    @property
    def has_words(self) -> bool:
        """Whether the client was shown any."""
        return any(self._read(message).text for message in self._shown)

    def calls(self, said: Reply) -> tuple[list[ToolCall], bool]:
        """The calls of ours in a round's reply, and whether there are others."""
        if not said.choices:
            return [], False
        message = said.choices[0].model_message
        if self._is_odd(said):
            return [], False
        theirs = {call.id for call in self._read(self._rounds.without_calls(message, self._names)).calls}
        return [call for call in self._read(message).calls if call.id not in theirs], bool(theirs)

    def go_on(self, said: Reply, results: Sequence[bytes]) -> None:
        """A round is over in which the model called nothing but tools of ours."""
        choice = said.choices[0]
        self._id = self._id or said.id
        self._shown.append(self._rounds.without_calls(choice.client_message, self._names))
        self._before.append(HiddenMessage(raw=self._dialect.as_input(choice.model_message), choice=choice))
        self._before += [HiddenMessage(raw=raw) for raw in results]
        self.usage = add_usage(self.usage, said.usage)

    def end(self, said: Reply, results: Sequence[bytes] = ()) -> tuple[Reply, HiddenMessages]:
        """The whole reply, under the id that the client knows it by, after the last round; ``results``: of the calls
        of ours in it.

        Calls of ours without results never happened. Where the last round came to nothing, neither did the earlier
        ones, but for the words that the client has seen. ``client`` is then the message for it.
        """
        if self._is_odd(said):
            return self._end_odd(said)
        choice = said.choices[0] if said.choices else ReplyChoice(index=0, model_message=b"", client_message=b"")
        shown, model = list(self._shown), b""
        if said.choices:
            shown.append(self._rounds.without_calls(choice.client_message, self._names))
            model = choice.model_message if results else self._rounds.without_calls(choice.model_message, self._names)
        self.client = client = self._rounds.merge_messages(shown) if shown else b""
        beside = HiddenMessages(before=tuple(self._before), after=tuple(HiddenMessage(raw=raw) for raw in results))
        if not self._says(model):
            model, beside = client, NOTHING_BESIDE
        whole = replace(choice, model_message=model, client_message=client)
        usage = add_usage(self.usage, said.usage)
        # A reply in which nothing was said is one all the same: the model was sent this context.
        choices = (whole,) if said.choices or self._says(client) else ()
        last = said.usage if self._before else b""
        return replace(said, id=self._id or said.id, choices=choices, usage=usage, last_usage=last), beside

    def _end_odd(self, said: Reply) -> tuple[Reply, HiddenMessages]:
        """The whole reply where the last round is of an undescribed shape. The client is shown that as it came."""
        choice = said.choices[0]
        self.client = choice.client_message
        reply = replace(said, id=self._id or said.id, usage=add_usage(self.usage, said.usage))
        if not self._shown:
            return reply, NOTHING_BESIDE
        shown = self._rounds.merge_messages(self._shown)
        earlier = replace(choice, model_message=shown, client_message=shown, terse=(), state=None)
        choices = (earlier,) if self._says(shown) else ()
        return replace(reply, choices=choices, unread=(*said.unread, choice.model_message)), NOTHING_BESIDE

    def _is_odd(self, said: Reply) -> bool:
        return bool(said.choices) and self._read(said.choices[0].model_message).is_malformed

    def _says(self, message: bytes) -> bool:
        return bool(message) and bool(self._read(message).parts)

    def _read(self, message: bytes) -> Message:
        return self._dialect.read_reply(message)
