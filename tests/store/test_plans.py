"""Plans of epochs as they are stored."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.history import Epoch, HeadMessage, Prefix
from tersely.store.history.sessions import read_epoch, write_epoch

TEXTS = st.text(st.characters() | st.characters(categories=["Cs"]))


@given(TEXTS, TEXTS)
def test_a_plan_reads_back_as_it_was(text: str, note: str) -> None:
    """Lone surrogates of a client's texts included."""
    epoch = Epoch(
        number=3,
        cut=7,
        head=(HeadMessage(layer="activity_log", role="user", text=text, tokens=4),),
        kept=(1, 2),
        reason="tokens",
        fingerprint="slim",
        references=(),
        created_at=datetime(2026, 3, 1, 12, 0, 1, 5, tzinfo=UTC),
        prefixes=(Prefix(layer="note", seq=9, text=note, tokens=2),),
    )
    assert read_epoch(write_epoch(epoch)) == epoch


@pytest.mark.parametrize("plan", [b"", b"{", b"[]", b'{"number":"\\ud800"}', b"\xff", b'{"a":' * 5_000])
def test_what_is_no_plan_is_refused(plan: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_epoch(plan)
