"""Descriptions of sent contexts: those of a growing request share what they have in common, and stay short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tersely.service.context.sent_contexts import (
    Description,
    KnownSessions,
    MessageSource,
    describe,
    describe_added,
)
from tersely.store.history.sent_contexts import BLOCK, SentMessage, checksum, decode, split_group, unpack
from tests.builders import user

GROUP = BLOCK * BLOCK


def sources_of(count: int, *, first: int = 1) -> list[MessageSource]:
    """Messages of which every third was sent otherwise than it is stored."""
    numbers = range(first, first + count)
    return [MessageSource(user(f"message {seq} " + "word " * 20).raw, seq) for seq in numbers]


def body_of(sources: list[MessageSource]) -> bytes:
    return b'{"messages":[' + b",".join(each.raw for each in sources) + b"]}"


def elements_of(description: Description, literals: dict[bytes, bytes]) -> list[SentMessage]:
    """The elements of a stored description, as the service reads them."""
    sent = decode(description.sent)
    assert sent is not None
    blocks = [block for group in sent.groups for block in split_group(literals[group])]
    return [each for block in (*blocks, *sent.blocks) for each in unpack(literals[block])] + unpack(sent.rest)


@given(st.lists(st.integers(1, 2 * BLOCK), min_size=1, max_size=30), st.integers(0, 3))
def test_a_growing_request_is_described_as_if_it_was_seen_for_the_first_time(steps: list[int], volatile: int) -> None:
    known = KnownSessions(budget=1 << 24)
    literals: dict[bytes, bytes] = {}
    sources = sources_of(BLOCK)
    new = {each.seq: each.raw for each in sources}
    last = describe(body_of(sources), "openai_chat", sources=sources, new=new, known=known.get("t", "s", 0))
    literals |= {each.digest: each.raw for each in last.literals}
    known.learn("t", "s", last)
    for step in steps:
        stay = last.elements.count
        added = sources_of(step, first=len(sources) + 1)
        sources += added
        again = [(each.raw, each) for each in sources[stay:]]
        new = {each.seq: each.raw for each in added}
        kept = min(volatile, len(again))
        last = describe_added("openai_chat", last.elements, again, new=new, known=known.get("t", "s", 0), volatile=kept)
        literals |= {each.digest: each.raw for each in last.literals}
        known.learn("t", "s", last)
        fresh = describe(
            body_of(sources), "openai_chat", sources=sources, new={each.seq: each.raw for each in sources},
            known=KnownSessions(budget=1 << 24).get("t", "s", 0),
        )  # fmt: skip
        assert last.sent == fresh.sent
        assert [each.seq for each in elements_of(last, literals)] == [each.seq for each in sources]
    sent = decode(last.sent)
    assert sent is not None
    assert sent.checksum == checksum(each.raw for each in sources)
    assert len(sent.blocks) < BLOCK
    assert len(unpack(sent.rest)) < BLOCK


def test_descriptions_of_long_requests_stay_short() -> None:
    known = KnownSessions(budget=1 << 24)
    sizes = []
    for count in (GROUP - 1, 4 * GROUP - 1, 16 * GROUP - 1):
        sources = sources_of(count)
        # Sent in another spelling than stored: each takes a patch.
        new = {each.seq: each.raw.replace(b'"role"', b'"name":"me","role"') for each in sources}
        found = describe(body_of(sources), "openai_chat", sources=sources, new=new, known=known.get("t", "s", 0))
        sizes.append(len(found.sent))
    assert sizes[0] < 700
    assert sizes[2] - sizes[1] <= 12 * 16


def test_description_of_an_earlier_version_is_read() -> None:
    sources = sources_of(BLOCK)
    found = describe(
        body_of(sources), "openai_chat", sources=sources, new={each.seq: each.raw for each in sources},
        known=KnownSessions(budget=1 << 20).get("t", "s", 0),
    )  # fmt: skip
    assert found.sent[:2] == b"\x9b\x01"  # eleven members, the first of which is the version
    earlier = decode(b"\x9a\x01" + found.sent[2:-1])
    assert earlier == decode(found.sent)
