"""Session ids that callers may choose."""

from __future__ import annotations

import pytest

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.sessions import MAX_SESSION_ID, check_session_id


@pytest.mark.parametrize("name", ["a", "Ünïcode ✓ id", "a/b?c=d", "...", "x" * MAX_SESSION_ID])
def test_printable_ids_are_taken_as_they_are(name: str) -> None:
    assert check_session_id(name, "id") == name


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\x00", ".", "..", "x" * (MAX_SESSION_ID + 1)])
def test_other_ids_are_refused_with_the_name_of_the_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_session_id(name, "X-Tersely-Session")
    assert refused.value.field == "X-Tersely-Session"
