"""The same API through a real server: what an in-process transport cannot show."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import httpx

from tests.support.services import serve


async def test_encoded_slashes_and_a_stream_over_a_real_socket(database) -> None:
    def check_over_socket(url: str) -> None:
        with httpx.Client(base_url=url, timeout=30) as http:
            for session_id in ("a/b", "ä/ö?#", "/"):
                path = f"/api/sessions/{quote(session_id, safe='')}"
                messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 100_000}]
                assert http.post(f"{path}/messages", json={"messages": messages}).status_code == 201
                assert http.get(path).json()["id"] == session_id
                assert http.get(path, params={"x": "%2F"}).json()["field"] == "x"
                assert len(http.get(f"{path}/export").json()["context"]) == 2
                assert http.get(f"{path}/turns/t1").json()["messages"] == 2
            deep = b'{"id":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
            refused = http.post("/api/sessions", content=deep, headers={"content-type": "application/json"})
            assert refused.status_code == 422
            assert refused.headers["content-type"] == "application/problem+json"
            assert http.get("/docs").status_code == 200

    with serve(database, "http://127.0.0.1:9") as service:
        await asyncio.to_thread(check_over_socket, service.url)
