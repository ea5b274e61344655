"""A summarizer that is configured and has no key says that an extract stands in."""

from __future__ import annotations

import logging

import pytest

from tests.api.conftest import serve
from tests.conftest import Database


@pytest.mark.parametrize(("model", "is_told"), [(None, False), ("gpt-4o-mini", True)])
async def test_an_extract_in_place_of_a_models_summary_says_why(
    database: Database, caplog: pytest.LogCaptureFixture, model: str | None, is_told: bool
) -> None:
    caplog.set_level(logging.WARNING)
    async with serve(database.dsn, summarizer_model=model) as api:
        await api.http.post("/api/sessions", json={"id": "s", "strategy": "compact"})
        for number in range(12):
            await api.append(
                "s",
                {"role": "user", "content": f"Question {number} " + "about the palette " * 60},
                {"role": "assistant", "content": f"Decided on shade {number}. " + "Some words of it. " * 60},
            )
        summary = (await api.http.post("/api/sessions/s/compact")).json()["summary"]
        assert summary["result"] == "extractive"
        reason = "no key is there for the summarizer's model: set TERSELY_SUMMARIZER_API_KEY, or the host's own key"
        assert summary["error"] == (reason if is_told else None)
        events = (await api.http.get("/api/sessions/s/events")).json()["items"]
        ends = [event for event in events if event["type"] == "compaction_end"]
        assert ends[-1].get("error") == (reason if is_told else None)
        assert (reason in caplog.text) == is_told
