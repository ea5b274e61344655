"""Field names in stored values: rows and spool files of earlier releases stay readable, and the reverse."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tersely.domain.history.history import Epoch, Reference, Repeats
from tersely.domain.history.links import PlacedMessage
from tersely.domain.history.reconciliation import Reconciliation
from tersely.domain.history.tiers import Tier
from tersely.store.commit.records import NewReply, ReferencedReply, RequestOutcome
from tersely.store.history.sessions import read_epoch, write_epoch

# A plan as release 1 stored it.
STORED_EPOCH = {
    "number": 3,
    "cut": 9,
    "head": [],
    "kept": [2],
    "reason": "high_watermark",
    "fingerprint": "slim",
    "references": [{"text": "a/b.py", "turn": 1, "position": 4, "mentions": 2, "used_by_model": True}],
    "created_at": "2026-01-01T00:00:00Z",
    "older_tokens": 5,
    "tiers": [
        {
            "subject": "archive",
            "until": 7,
            "chars": 0,
            "style": "head",
            "way": "query_db",
            "limits": None,
            "listed": [3],
        }
    ],
    "prefixes": [],
    "retrieved": [],
    "whole": [],
    "floor": 2,
    "told": 6,
    "quoted": 8,
    "is_stale": True,
    "is_void": True,
    "settled": 11,
    "injected": [],
    "has_injected": True,
    "covered": None,
}


def test_a_stored_epoch_of_an_earlier_release_is_read() -> None:
    assert read_epoch(msgspec.json.encode(STORED_EPOCH)) == Epoch(
        number=3,
        cut=9,
        head=(),
        kept=(2,),
        reason="high_watermark",
        fingerprint="slim",
        references=(Reference(text="a/b.py", turn=1, last_seq=4, mentions=2, used_by_model=True),),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        older_tokens=5,
        tiers=(Tier(subject="archive", until=7, read_back="query_db", digest_seqs=(3,)),),
        cleared_at=2,
        summary_covers_to=6,
        head_covers_to=8,
        is_stale=True,
        must_rebuild=True,
        memos_chosen_to=11,
        has_injected=True,
    )


def test_a_stored_epoch_keeps_the_names_that_earlier_releases_read() -> None:
    # What is new since is passed over by them.
    written = msgspec.json.decode(write_epoch(read_epoch(msgspec.json.encode(STORED_EPOCH))))
    assert written == {**STORED_EPOCH, "is_plain": False, "folds_repeats": False, "repeats": None, "excerpts": []}


def test_decisions_on_repeated_text_are_stored_with_the_epoch() -> None:
    repeats = Repeats(replaced=b"\x00\xff\x01\x02", asked_again=(4, 7), decided_to=9)
    epoch = msgspec.structs.replace(read_epoch(msgspec.json.encode(STORED_EPOCH)), repeats=repeats)
    assert read_epoch(write_epoch(epoch)) == epoch


def spooled_names(value: object) -> set[str]:
    members: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return set(members)


def test_spooled_values_keep_the_names_that_earlier_releases_read() -> None:
    placed = PlacedMessage(seq=1, turn=1, position=1.0, is_new=True)
    decision = Reconciliation(kind="new", placed=(placed,), superseded=(), restored=(), last_seq=1, turns=1)
    reply = NewReply(raw=b"", model_raw=None, digest=b"", chain=None, tokens=0, finish=None)

    assert spooled_names(placed) == {"seq", "turn", "place", "is_new", "status"}
    assert spooled_names(decision) == {
        "kind",
        "placed",
        "superseded",
        "revived",
        "last_seq",
        "turns",
        "after",
        "answers_last",
    }
    assert {"keeper", "is_in_words"} <= spooled_names(reply)
    assert spooled_names(ReferencedReply(seq=1, own_indexes=(0,), own_before_reply=0)) >= {"seq", "own", "front"}
    assert "answered_place" in {field.encode_name for field in msgspec.structs.fields(RequestOutcome)}
