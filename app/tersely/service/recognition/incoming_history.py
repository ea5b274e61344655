"""The messages of a request, and the hashes by which its session is found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b

import msgspec

from tersely.dialects.clients.known import refuses_for_client
from tersely.domain.history.chain import DIGEST_BYTES, canonical, is_framed_summary, summary_anchors
from tersely.domain.history.links import MessageIdentity
from tersely.domain.messages import Message, Reasoning, Text

# The newest replies are looked up first. The other replies are looked up only if the client went back further.
NEWEST = 8
# Shorter replies ("OK", "Done.") occur in many sessions and identify none.
MIN_REPLY = 20
# A client's summary is one of so many first messages, or of so many last ones before the first reply.
FIRST = 4
LAST = 64


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an assistant message at the end of a request, and the chain value before that message."""

    text: str
    chain_before: bytes


class IncomingHistory(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The messages of a request in order, their identities, and the chain value after each."""

    messages: tuple[Message, ...]
    identities: tuple[MessageIdentity, ...]
    chains: tuple[bytes, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of the messages."""
        return sum([len(message.raw) for message in self.messages])

    @cached_property
    def links(self) -> list[int]:
        """The indexes of the messages that are links of the chain: no instructions, no injected blocks."""
        return [index for index, identity in enumerate(self.identities) if identity.is_link]

    @property
    def head_chain(self) -> bytes:
        """The chain value of the whole history. The reply's chain value extends it."""
        return self.chains[-1] if self.chains else b""

    @property
    def has_replies(self) -> bool:
        """True if a link of the history is an assistant message."""
        return any(self.identities[index].role == "assistant" for index in self.links)

    @property
    def prefill(self) -> Prefill | None:
        """The beginning of a reply at the end of the request; None if the request ends with anything else."""
        last = next((index for index in reversed(range(len(self.identities))) if self.identities[index].is_link), None)
        if last is None or self.identities[last].role != "assistant":
            return None
        message = self.messages[last]
        if not all(isinstance(part, Text | Reasoning) for part in message.parts) or not message.text:
            return None
        return Prefill(text=message.text, chain_before=self.chains[last - 1] if last else b"")

    @property
    def question_digest(self) -> bytes:
        """The hash of the question: of the links after the last assistant message."""
        question = b""
        for index in self.links:
            identity = self.identities[index]
            question = b"" if identity.role == "assistant" else extend(question, identity.digest)
        return question

    def reply_chains(self) -> list[bytes]:
        """Return the chain value after each assistant message, newest first."""
        return [
            self.chains[index]
            for index in range(len(self.messages) - 1, -1, -1)
            if self.messages[index].role == "assistant"
        ]

    def unanswered_beginnings(self) -> list[bytes]:
        """Return the chain values of the history's prefixes, longest first, if no message in it is a reply with
        content; else none.
        """
        links = self.links
        if any(self.messages[index].role != "user" and self.messages[index].parts for index in links):
            return []
        return [self.chains[index] for index in reversed(links[:-1]) if self.messages[index].role == "user"]

    def refused_beginning(self) -> bytes | None:
        """Return the chain value before a client's refusal of a reply that the history omits; None if it has no
        refusal.
        """
        links = self.links
        if len(links) < 2 or self.has_replies or not refuses_for_client(self.messages[links[-1]]):
            return None
        return self.chains[links[-2]]

    def identifying_replies(self) -> list[bytes]:
        """Return the digests of the newest assistant messages that are long enough or call tools, newest first."""
        found: list[bytes] = []
        for index in range(len(self.messages) - 1, -1, -1):
            message = self.messages[index]
            if message.role == "assistant" and (message.calls or len(message.text.strip()) >= MIN_REPLY):
                found.append(self.identities[index].digest)
                if len(found) == NEWEST:
                    break
        return found

    def summaries(self) -> list[bytes]:
        """Return anchors of possible client-written summaries, from messages near the beginning of the history.

        Most clients begin with their summary. Codex puts it after all user messages that came before.
        """
        return [anchor for message in self._summary_candidates() for anchor in summary_anchors(message)]

    @property
    def summary_size(self) -> int:
        """Return how many bytes `summaries` reads."""
        return sum(len(message.raw) for message in self._summary_candidates())

    def _summary_candidates(self) -> Sequence[Message]:
        roles = [message.role for message in self.messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        return [*self.messages[:FIRST], *self.messages[max(FIRST, first - LAST) : first]]

    def is_framed_summary(self, index: int) -> bool:
        """Return whether in this message the client wraps a summary of its own."""
        return is_framed_summary(self.messages[index])

    def index_of_chain(self, chain: bytes) -> int:
        """Return the index of the message with this chain value: the first one, since instructions repeat the value
        before them.
        """
        return self.chains.index(chain)


def digest(message: Message) -> tuple[bytes, bool]:
    """Return a message's digest, and whether it is a link of the history.

    Instructions and injected context are identified by their bytes, links by their canonical parts.
    """
    identity = canonical(message)
    if identity:
        return blake2b(identity, digest_size=DIGEST_BYTES).digest(), True
    return blake2b(message.raw, digest_size=DIGEST_BYTES).digest(), False


def extend(chain: bytes, identity: bytes) -> bytes:
    """Return the chain value after a link with the digest ``identity``."""
    return blake2b(chain + identity, digest_size=DIGEST_BYTES).digest()


def identify(message: Message) -> MessageIdentity:
    """Return a message's identity: its digest and the facts that reconciliation needs."""
    identity, is_link = digest(message)
    return MessageIdentity(
        digest=identity, is_link=is_link, starts_turn=is_link and message.starts_turn, role=message.role
    )


def hash_history(messages: Sequence[Message]) -> IncomingHistory:
    """Hash ``messages`` for a session lookup."""
    identities: list[MessageIdentity] = []
    chains: list[bytes] = []
    chain = b""
    for message in messages:
        identity = identify(message)
        if identity.is_link:
            chain = extend(chain, identity.digest)
        identities.append(identity)
        chains.append(chain)
    return IncomingHistory(messages=tuple(messages), identities=tuple(identities), chains=tuple(chains))
