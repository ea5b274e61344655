"""Recorded replies of real providers through the whole proxy: byte for byte where nothing is taken out.

The recordings are not part of the project; without them these tests are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Database
from tests.proxy.harness import RawUpstream, Service, http_head, kept, post, serve

PATHS = {
    "openai.chat": "/v1/chat/completions",
    "openai-compat.chat": "/v1/chat/completions",
    "openai.responses": "/v1/responses",
    "anthropic.messages": "/v1/messages",
    "gemini.generateContent": "/v1beta/models/m:generateContent",
    "gemini.streamGenerateContent": "/v1beta/models/m:streamGenerateContent?alt=sse",
}
BODIES: Mapping[str, dict[str, Any]] = {
    "openai.responses": {"model": "m", "input": "hello"},
    "gemini": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
    "": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}
# Every so many recordings of each kind.
STEP = 4


@pytest.fixture
def recordings(shared_data: Path) -> Path:
    directory = shared_data / "wire"
    if not directory.is_dir():
        pytest.skip(f"no recorded traffic at {directory}")
    return directory


@pytest.fixture(scope="module")
def tagless(store: Database, raw: RawUpstream) -> Iterator[Service]:
    """The service as it is by default, but for its own words to the model: tags are looked for."""
    with serve(store, raw.url, instructions="off") as running:
        yield running


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("is_looked_at", [False, True])
async def test_a_reply_comes_through_byte_for_byte(
    plain_behind_raw: Service,
    tagless: Service,
    raw: RawUpstream,
    recordings: Path,
    key: str,
    api: str,
    is_looked_at: bool,
) -> None:
    service = tagless if is_looked_at else plain_behind_raw
    lines = [json.loads(line) for line in (recordings / "index.jsonl").read_text().splitlines()]
    chosen = [line for line in lines if line["api"] == api][::STEP]
    assert chosen
    for number, line in enumerate(chosen):
        recorded = (recordings / line["file"]).read_bytes()
        kind = line["content_type"] or "application/json"
        pieces = [piece for piece in re.split(rb"(?<=\n\n)|(?<=\r\n\r\n)", recorded) if piece]
        raw.answer(http_head(kind), *pieces)
        body = next(each for begin, each in BODIES.items() if api.startswith(begin))
        sent: dict[str, Any] = dict(body)
        if line["stream"] and not api.startswith("gemini"):
            sent |= {"stream": True, **({"stream_options": {"include_usage": True}} if api.endswith("chat") else {})}
        session = f"{key}-{number}"

        answer = await post(service, json.dumps(sent).encode(), path=PATHS[api], X_Tersely_Session=session)

        assert answer.status == 200
        assert answer.body == recorded, line["file"]
        stored = await kept(service, session)
        assert stored[0].role == "user"
        assert {each.role for each in stored[1:]} <= {"assistant"}
