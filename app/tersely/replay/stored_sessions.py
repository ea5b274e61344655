"""Read a session of a running service through the REST API."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import aiohttp

from tersely.dialects.wire import raw_json
from tersely.domain.errors import TerselyError
from tersely.replay.checks import StoredClientMessage

PAGE = 200


class NoAnswer(TerselyError):
    """The service did not answer as it should."""


async def read_session(
    http: aiohttp.ClientSession, address: str, session_id: str, headers: Mapping[str, str]
) -> list[StoredClientMessage]:
    """Return all messages of a session as the client knows them, in order."""
    stored: list[StoredClientMessage] = []
    after: object = 0
    while True:
        query = {"view": "client", "limit": str(PAGE), "after": str(after)}
        url = f"{address}/api/sessions/{quote(session_id, safe='')}/messages"
        async with http.get(url, params=query, headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                raise NoAnswer(f"{url}: status {response.status}")
        page = raw_json.split_object(body)
        for item in raw_json.split_array(page["items"]):
            members = raw_json.split_object(item)
            stored.append(
                StoredClientMessage(raw=members["raw"], is_reply=raw_json.load(members["role"]) == "assistant")
            )
        after = raw_json.load(page.get("next", b"null"))
        if after is None:
            return stored
