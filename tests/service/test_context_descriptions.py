"""Descriptions of sent contexts: those of a growing request share what they have in common, and stay short."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.service.context.sent_contexts import (
    RECENT_BYTES,
    Description,
    Elements,
    KnownSessions,
    MessageSource,
    describe,
    describe_added,
)
from tersely.store.commit.records import NewReply
from tersely.store.history.patches import apply_patch
from tersely.store.history.sent_contexts import (
    ADDED,
    BLOCK,
    SHORTENED,
    VERSION,
    SentContext,
    SentMessage,
    _without_patches,
    checksum,
    decode,
    digest_of,
    encode,
    pack,
    renumber,
    split_group,
    unpack,
)
from tersely.store.history.sent_contexts import (
    GROUP as BLOCKS,
)
from tests.builders import user

GROUP = BLOCK * BLOCKS


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
    blocks = [block for group in sent.groups for block in split_group(literals[group], sent.version)]
    return [each for block in (*blocks, *sent.blocks) for each in unpack(literals[block])] + unpack(sent.rest)


@pytest.mark.parametrize(
    ("version", "run"),
    [
        (5, 10**12),
        (5, [[0, 1], False, [10**12]]),
        (5, [[0, 1], False, [400_000] * 3]),
        (4, 10**12),
        (4, [b"", 0, 1, 10**12]),
        (4, [b"", 0, *[1, 400_000] * 3]),
    ],
)
def test_a_few_bytes_do_not_stand_for_very_many_messages(version: int, run: Any) -> None:
    for elements in ([{1: run}], [{1: 10, 20: run}]):
        with pytest.raises(msgspec.DecodeError, match="more than"):
            unpack(msgspec.msgpack.encode(elements), version=version)


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
    assert len(sent.blocks) < BLOCKS
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
    assert sizes[0] < 200
    assert sizes[2] - sizes[1] <= 12 * 11


elements = st.one_of(
    st.builds(SentMessage, st.integers(1, 9)),
    st.builds(
        SentMessage,
        st.integers(1, 9),
        patch=st.sampled_from([(0, 3), (0, -3, b"x", -1, 0), (b"x",), (-4, 2**40, 5, 0)]),
        is_of_model=st.booleans(),
    ),
    st.builds(
        SentMessage,
        st.integers(0, 9),
        shows=st.sampled_from([0, SHORTENED, ADDED]),
        literal=st.sampled_from([b"", b"12345678"]),
        patch=st.sampled_from([(), (b"x", 1, -1)]),
        layer=st.sampled_from(["", "repeats"]),
        also=st.sampled_from([(), (3, 4)]),
    ),
)


@given(st.lists(elements, max_size=20), st.integers(1, 2**40))
def test_packed_elements_come_back_as_they_were(given_elements: list[SentMessage], first: int) -> None:
    assert unpack(pack(given_elements)) == given_elements
    in_order = [
        SentMessage(first + at, patch=each.patch, is_of_model=each.is_of_model and bool(each.patch))
        for at, each in enumerate(given_elements)
    ]
    assert unpack(pack(in_order)) == in_order


def test_messages_that_take_the_same_patch_are_one_short_entry() -> None:
    """A client sends each reply in its own spelling: every second message takes a patch."""
    sent = [SentMessage(200 + n, patch=() if n % 2 else (0, -34, -1, 0)) for n in range(BLOCK)]
    packed = pack(sent)
    assert unpack(packed) == sent
    assert len(packed) < 25


def test_replies_with_their_own_tags_put_back_are_one_short_entry() -> None:
    """The tags stand in the model's views: descriptions need not repeat them."""
    known = KnownSessions(budget=1 << 20)
    rest: tuple[SentMessage, ...] = ()
    for seq in range(2, 12, 2):
        session = known.get("t", "s", 0)
        question = user(f"question {seq}").raw
        body = b'{"messages":[' + question + b"]}"
        described = describe(body, "openai_chat", sources=[MessageSource(question, seq - 1)], new={}, known=session)
        # The client's echo lacks the refusal, and the model's view has a tag of its own.
        words, tag = b'{"role":"assistant","content":"' + b"word " * 20, b"<terse>answered %d</terse>" % seq
        reply = NewReply(
            raw=words + b'","refusal":null}', model_raw=words + tag + b'","refusal":null}', digest=b"", chain=None,
            tokens=0, finish=None,
        )  # fmt: skip
        known.learn("t", "s", described, {seq: reply}, {seq: digest_of(reply.raw)})
        echo = MessageSource(words + tag + b'"}', seq)
        before = Elements(rest=rest)
        added = [(question, MessageSource(question, seq - 1)), (echo.raw, echo)]
        session = known.get("t", "s", 0)
        found = describe_added("openai_chat", before, added, new={seq - 1: question}, known=session)
        rest = found.elements.rest
        assert reply.model_raw is not None
        last = rest[-1]
        assert last.is_of_model
        assert apply_patch(reply.model_raw, last.patch) == echo.raw
        assert b"terse" not in found.sent
    assert len(pack(rest)) < 24


def test_model_views_are_remembered_within_the_same_bounds() -> None:
    known = KnownSessions(budget=1 << 20)
    body = b'{"messages":[]}'
    for size, kept in ((100, 1), (RECENT_BYTES, 0)):
        described = describe(body, "openai_chat", sources=(), new={}, known=known.get("t", "s", 0))
        reply = NewReply(raw=b"x", model_raw=b"y" * size, digest=b"", chain=None, tokens=0, finish=None)
        known.learn("t", "s", described, {1: reply})
        assert len(known.get("t", "s", 0).views) == kept


NO_ELEMENTS: list[Any] = [[{1: []}], [{1: [1, 1]}], [None], [[1, 0, b"", "x"]]]


@pytest.mark.parametrize(
    ("version", "elements"),
    [
        *[(4, each) for each in NO_ELEMENTS],
        *[(5, each) for each in NO_ELEMENTS],
        (4, [{1: [b"", 1, 1]}]),
        (4, [{1: [b"", 1, b"", 1]}]),
        (5, [{1: [b"", 0, 1, 1]}]),
        (5, [{1: [[1], False, [1]]}]),
        (5, [{1: [[b"x", 1, b"x", 1], False, [1]]}]),
        (5, [[1, 0, b"", [1]]]),
        (5, [[1, 0, b"", 3]]),
        *[(version, [each]) for version in (4, 5) for each in ({2**64 - 1: 1}, {2**63 - 1: 3}, {-1: 1}, [2**64 - 1])],
    ],
)
def test_other_bytes_are_no_elements(version: int, elements: Any) -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack(msgspec.msgpack.encode(elements), version=version)


def description(version: int, **more: Any) -> SentContext:
    values = {"blocks": (), "groups": (), "rest": pack([SentMessage(1)]), "instructions": b"", "rounds": ()}
    fields: dict[str, Any] = {"layers": (("tail", 9), ("a new layer", 2)), "checksum": 5, "count": 1, "tools": b"="}
    return SentContext(version=version, **values | fields | {"dialect": "anthropic"} | more)


@pytest.mark.parametrize("version", [3, 4, 5])
def test_descriptions_with_numbers_for_names_are_read(version: int) -> None:
    for more in ({}, {"dialect": "another"}, {"groups": (b"g" * 8, b"h" * 8), "rounds": (1, 2)}):
        sent = description(version, **more)
        assert decode(encode(sent)) == sent


def test_description_of_an_earlier_version_is_what_it_was() -> None:
    first = (
        b"\x9b\x01\xa9anthropic\x90\xc4\x04\x91\x81\x01\x01\xc4\x00"
        b"\x92\x92\xa4tail\x09\x92\xaba new layer\x02\x90\x05\x01\xc4\x01=\x90"
    )
    assert decode(first) == description(1)
    # The first descriptions lacked the members at the end.
    assert decode(b"\x99" + first[1:-4]) == description(1, tools=b"")
    assert len(encode(description(3))) < len(first)


def test_elements_of_an_earlier_version_are_what_they_were() -> None:
    packed = (
        b"\x97\x81\x01\x01\x81\x02\x94\xc4\x00\x01\xcd\x02X\x01\x81\x04\x94\xc4\x01x\x02\x00\x00"
        b"\x81\x05\x96\xc4\x01x\xff\x07\x01\t\x00\x99\x08\x01\xc4\x00\x03\x04\xc4\x03cut\xa7repeats\x90\xc2"
        b"\x99\t\x01\xc4\x0812345678\xff\x00\xc4\x00\xa4tail\x92\n\x0b\xc2\x99\x00\x02\xc4\x0887654321\xff\x00"
        b"\xc4\x00\xa0\x90\xc2"
    )
    sent = decode(
        b"\x9b\x04\x02\x90\xc4f" + packed + b"\xc4\x00\x92\x92\x02\t\x92\xaba new layer\x02\x90\x05\n\xc4\x01=\x90"
    )
    assert sent == description(4, rest=packed, count=10)
    assert unpack(packed, version=4) == [
        SentMessage(1),
        SentMessage(2, patch=(0, 600, b"", -1, 0)),
        SentMessage(3),
        SentMessage(4, patch=(b"x", -2, 0)),
        SentMessage(5, patch=(0, 7, b"x"), is_of_model=True),
        SentMessage(6),
        SentMessage(7, patch=(0, 9, b"x"), is_of_model=True),
        SentMessage(8, SHORTENED, patch=(0, 3, b"cut", -4, 0), layer="repeats"),
        SentMessage(9, SHORTENED, b"12345678", layer="tail", also=(10, 11)),
        SentMessage(0, ADDED, b"87654321"),
    ]


def test_groups_of_earlier_versions_have_longer_digests() -> None:
    twelve = [bytes([n]) * 12 for n in range(16)]
    assert split_group(b"".join(twelve), 2) == twelve
    eight = [bytes([n]) * 8 for n in range(8)]
    assert split_group(b"".join(eight)) == eight


def test_a_description_of_a_version_to_come_is_not_read() -> None:
    assert decode(encode(description(6))) is None
    assert decode(b"\xc1") is None


def test_messages_that_were_stored_elsewhere_are_renumbered() -> None:
    rest = [SentMessage(4, patch=(0, 2, -1, 0)), SentMessage(5), SentMessage(6)]
    for version, packed in ((5, pack(rest)), (4, b"\x91\x81\x04\x94\xc4\x00\x01\x02\x02")):
        moved = decode(renumber(encode(description(version, rest=packed)), {5: 7, 6: 8}))
        assert moved is not None
        found = unpack(moved.rest)
        assert [each.seq for each in found] == [4, 7, 8]
        assert [apply_patch(b"abcdef", each.patch) for each in found if each.patch] == [b"abf"]


def test_bytes_that_were_put_in_are_forgotten_with_any_removed_message() -> None:
    """Tersely may have put words of the removed message beside another one."""
    rest = [SentMessage(4, patch=(0, 5, b"a quote of 1", -1, 0)), SentMessage(5, patch=(0, -9)), SentMessage(6)]
    left = _without_patches(encode(description(VERSION, rest=pack(rest))), {1})
    assert left is not None
    sent = decode(left)
    assert sent is not None
    assert unpack(sent.rest) == [SentMessage(4), *rest[1:]]


def test_blocks_of_an_earlier_version_are_not_taken_for_new_ones() -> None:
    stored = encode(description(4, blocks=(b"b" * 8,)))
    assert renumber(stored, {1: 2}) == stored
