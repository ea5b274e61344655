"""A service in front of a scripted model, for the commands of a module; each test has sessions of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import Queues, ScriptedModel, ScriptedReply, run_scripted
from tests.cli.terminal import Ran, Terminal, open_terminal, run
from tests.conftest import Database
from tests.support.loops import background
from tests.support.services import serve

ADMIN_KEY = "the-operator-s-own-key"


@dataclass(slots=True, kw_only=True)
class Running:
    """A service at ``url`` in front of a model at ``upstream``, which answers as ``script`` says."""

    url: str
    upstream: str
    _queues: Queues
    _terminals: list[Terminal] = field(default_factory=list)

    def script(self, *replies: ScriptedReply) -> str:
        """The name of a model that answers like this, in order."""
        name = f"model-{secrets.token_hex(4)}"
        self._queues.push(name, *replies)
        return name

    def run(self, *arguments: str | bytes, stdin: bytes = b"", **given: str) -> Ran:
        """A command that talks to this service."""
        return run(*arguments, stdin=stdin, **{"TERSELY_URL": self.url, **given})

    def at_terminal(self, *arguments: str, **given: str) -> Terminal:
        """The same at a terminal."""
        terminal = open_terminal(*arguments, **{"TERSELY_URL": self.url, **given})
        self._terminals.append(terminal)
        return terminal

    def ask(self, method: str, path: str, **how: Any) -> httpx.Response:
        """Return the answer of its REST API."""
        return httpx.request(method, f"{self.url}/api{path}", **how)


@pytest.fixture(scope="module")
def running(store: Database) -> Iterator[Running]:
    """A service for the module."""
    queues = Queues()
    with background() as there:
        model = run_scripted(model=ScriptedModel(script=queues, is_strict=True))
        upstream = there.run(model.__aenter__())
        with serve(store, upstream.base_url, admin_key=ADMIN_KEY) as service:
            found = Running(url=service.url, upstream=upstream.base_url, _queues=queues)
            yield found
            for terminal in found._terminals:
                terminal.close()
        there.run(model.__aexit__(None, None, None))


@pytest.fixture
def session() -> str:
    """The id of a session that no other test has."""
    return f"s-{secrets.token_hex(6)}"


Say = Callable[..., None]


@pytest.fixture
def say(running: Running, session: str) -> Say:
    """Adds messages to the session: user and assistant by turns."""

    def add(*texts: str) -> None:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        running.ask("POST", f"/sessions/{session}/messages", json={"messages": messages}).raise_for_status()

    return add
