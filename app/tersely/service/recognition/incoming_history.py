"""A request as it arrived: its messages, and by what its session can be recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from tersely.dialects.clients.known import refuses_for_client
from tersely.domain.history.chain import DIGEST_BYTES, canonical, summary_anchors
from tersely.domain.history.reconciliation import Incoming
from tersely.domain.messages import Message, Reasoning, Text

# Histories are looked up by their newest replies first; a client that went back further is found by the rest.
NEWEST = 8
# Replies shorter than this ("OK", "Done.") are said in many sessions: they identify nothing by themselves.
MIN_REPLY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The text of an assistant message that a request ends with, and the value of the chain before that message."""

    text: str
    chain_before: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingHistory:
    """The messages of a request in order, their identities, and the value of the chain after each."""

    messages: tuple[Message, ...]
    incoming: tuple[Incoming, ...]
    chains: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return sum(len(message.raw) for message in self.messages)

    @property
    def links(self) -> list[int]:
        """The indexes of the messages that are part of the history proper."""
        return [index for index, incoming in enumerate(self.incoming) if incoming.is_link]

    @property
    def head_chain(self) -> bytes:
        """The identity of the whole history; the reply's chain goes on from here."""
        return self.chains[-1] if self.chains else b""

    @property
    def has_replies(self) -> bool:
        """Whether an assistant message is part of the history proper."""
        return any(self.incoming[index].role == "assistant" for index in self.links)

    @property
    def prefill(self) -> Prefill | None:
        """The beginning of a reply that the request ends with; None where it ends with anything else."""
        last = next((index for index in reversed(range(len(self.incoming))) if self.incoming[index].is_link), None)
        if last is None or self.incoming[last].role != "assistant":
            return None
        message = self.messages[last]
        if not all(isinstance(part, Text | Reasoning) for part in message.parts) or not message.text:
            return None
        return Prefill(text=message.text, chain_before=self.chains[last - 1] if last else b"")

    @property
    def asked_digest(self) -> bytes:
        """The identity of what the request asks: of the links behind the last assistant message."""
        asked = b""
        for index in self.links:
            incoming = self.incoming[index]
            asked = b"" if incoming.role == "assistant" else extend(asked, incoming.digest)
        return asked

    def reply_chains(self) -> list[bytes]:
        """The chain after each assistant message, the longest history first."""
        return [
            self.chains[index]
            for index in range(len(self.messages) - 1, -1, -1)
            if self.messages[index].role == "assistant"
        ]

    def unanswered_beginnings(self) -> list[bytes]:
        """The chains of the history's beginnings, the longest first, where nothing in it was answered with anything."""
        links = self.links
        if any(self.messages[index].role != "user" and self.messages[index].parts for index in links):
            return []
        return [self.chains[index] for index in reversed(links[:-1]) if self.messages[index].role == "user"]

    def refused_beginning(self) -> bytes | None:
        """The chain of what comes before a client's refusal of a reply that it does not send; None without one."""
        links = self.links
        if len(links) < 2 or self.has_replies or not refuses_for_client(self.messages[links[-1]]):
            return None
        return self.chains[links[-2]]

    def telling_replies(self) -> list[bytes]:
        """The digests of the newest assistant messages that are long enough, or call tools; newest first."""
        found: list[bytes] = []
        for index in range(len(self.messages) - 1, -1, -1):
            message = self.messages[index]
            if message.role == "assistant" and (message.calls or len(message.text.strip()) >= MIN_REPLY):
                found.append(self.incoming[index].digest)
                if len(found) == NEWEST:
                    break
        return found

    def summaries(self) -> list[bytes]:
        """Anchors of what may be a client's own summary: in the first messages of the history.

        Codex puts it behind everything that the user ever said.
        """
        roles = [message.role for message in self.messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        return [anchor for message in self.messages[: max(4, first)] for anchor in summary_anchors(message)]

    def index_of_chain(self, chain: bytes) -> int:
        """The message whose chain that is: the first of equal ones, since instructions repeat the value before."""
        return self.chains.index(chain)


def digest(message: Message) -> tuple[bytes, bool]:
    """A message's identity, and whether it is a link of the history.

    Instructions and injected context are known by their bytes, links by their canonical parts.
    """
    identity = canonical(message)
    if identity:
        return blake2b(identity, digest_size=DIGEST_BYTES).digest(), True
    return blake2b(message.raw, digest_size=DIGEST_BYTES).digest(), False


def digest_of_words(text: str) -> bytes:
    """The identity of a reply that is nothing but ``text``."""
    return digest(Message(role="assistant", parts=(Text(text=text),), raw=b""))[0]


def extend(chain: bytes, identity: bytes) -> bytes:
    """The chain after a link with that digest."""
    return blake2b(chain + identity, digest_size=DIGEST_BYTES).digest()


def identify(message: Message) -> Incoming:
    """A message's identity and what placing it needs."""
    identity, is_link = digest(message)
    return Incoming(digest=identity, is_link=is_link, starts_turn=is_link and message.starts_turn, role=message.role)


def hash_history(messages: Sequence[Message], identify: Callable[[Message], Incoming] = identify) -> IncomingHistory:
    """Everything about ``messages`` that a lookup needs."""
    incoming: list[Incoming] = []
    chains: list[bytes] = []
    chain = b""
    for message in messages:
        known = identify(message)
        if known.is_link:
            chain = extend(chain, known.digest)
        incoming.append(known)
        chains.append(chain)
    return IncomingHistory(messages=tuple(messages), incoming=tuple(incoming), chains=tuple(chains))
