"""Conversations of OpenAI's own client in which each request names the reply before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from tests.support.rows import StoredMessage, messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model

MODEL = "gpt-5-mini"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}


@contextmanager
def client_of(service: Service, **headers: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=service.base_url, api_key="sk-upstream", max_retries=0, default_headers=headers
    ) as made:
        yield made


class Talk:
    """A conversation in which each request names the reply before it."""

    def __init__(self, service: Service, key: str, *, streams: bool = False, **more: Any) -> None:
        self.service, self.key, self.streams, self.more = service, key, streams, more
        self.last: Any = None
        self.session = ""
        self.source = ""

    def say(self, content: Any, **more: Any) -> Any:
        """The reply to ``content``."""
        named = {"previous_response_id": self.last.id} if self.last is not None else {}
        request = {"model": MODEL, "input": content, "user": self.key, **named, **self.more, **more}
        with client_of(self.service) as client:
            if self.streams:
                with client.responses.with_streaming_response.create(stream=True, **request) as response:
                    headers = response.headers
                    events = list(response.parse())
                assert events[-1].type == "response.completed"
                previous_ids = {e.response.previous_response_id for e in events if getattr(e, "response", None)}
                assert previous_ids == {request.get("previous_response_id")}
                self.last = events[-1].response
            else:
                raw = client.responses.with_raw_response.create(**request)
                headers, self.last = raw.headers, raw.parse()
        assert self.last.previous_response_id == request.get("previous_response_id")
        self.session, self.source = headers["x-tersely-session"], headers["x-tersely-session-source"]
        return self.last

    async def stored(self) -> list[StoredMessage]:
        return [each for each in await messages_by_number(self.service, self.session) if each.turn]


def calls_in(reply: Any) -> list[Any]:
    return [item for item in reply.output if item.type == "function_call"]


def upstream_input(model: Model, key: str) -> list[Any]:
    """The items of the newest request of ``key``; a string is one."""
    items = json.loads(model.requests(key)[-1].body)["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


def words(items: list[Any]) -> list[str]:
    """Return the user's words, and how often the model answered in between."""
    return [str(item["content"]) if item.get("role") == "user" else "-" for item in items]


def whole_input(model: Model, key: str) -> list[Any]:
    """Return the model's whole input for the newest request of ``key``: with the part that the host had of it."""
    request = json.loads(model.requests(key)[-1].body)
    named = request.get("previous_response_id")
    before = list(model.state.kept.replies[named].items) if named else []
    return before + upstream_input(model, key)
