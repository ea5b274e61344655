"""The list of sessions, pages without sessions, and the causes of cache misses."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tersely.console.epoch_reasons import EPOCH_REASONS
from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tersely.strategies.epochs.policies import REASONS
from tests.conftest import Database
from tests.support.services import serve
from tests.support.upstreams import scripted

INPUT_TOKENS = 2_345


@pytest.fixture
async def console(store: Database) -> AsyncIterator[httpx.AsyncClient]:
    """A visitor of a service without sessions; its model reports the same usage for each call."""

    def answer(received: ReceivedRequest) -> ScriptedReply | None:
        text = "Done."
        if "/messages" in received.path:
            usage: dict[str, Any] = {"input_tokens": INPUT_TOKENS, "output_tokens": 5}
            reply: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": text}]}
            return ScriptedReply(message=reply, usage=usage)
        usage = {"prompt_tokens": INPUT_TOKENS, "completion_tokens": 5, "total_tokens": INPUT_TOKENS + 5}
        return ScriptedReply(message={"role": "assistant", "content": text}, usage=usage)

    with scripted() as model:
        model.state.script = answer
        with serve(store, model.url, epoch='{"stride": 2}') as service:
            async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
                yield http


async def test_pages_without_sessions_name_the_address_of_the_service(console: httpx.AsyncClient) -> None:
    address = str(console.base_url).rstrip("/")
    sessions = (await console.get("/console/sessions")).text
    assert f"OPENAI_BASE_URL={address}/v1" in sessions
    assert f"ANTHROPIC_BASE_URL={address}\n" in sessions or f"ANTHROPIC_BASE_URL={address}<" in sessions
    for path in ("/console/savings", "/console/live"):
        page = (await console.get(path)).text
        assert f"<code>{address}</code>" in page, path
        assert 'href="/console/sessions">Sessions</a> says how' in page
    assert "There are no sessions yet" in (await console.get("/console/search", params={"query": "x"})).text


async def ask(http: httpx.AsyncClient, history: list[dict[str, Any]], text: str, session: str) -> None:
    """Ask in a session, with the whole history."""
    history.append({"role": "user", "content": text})
    body = {"model": "gpt-4o", "messages": history}
    answer = await http.post("/v1/chat/completions", json=body, headers={"x-tersely-session": session})
    assert answer.status_code == 200, answer.text
    history.append(answer.json()["choices"][0]["message"])


async def test_list_shows_the_tokens_that_were_sent(console: httpx.AsyncClient) -> None:
    history: list[dict[str, Any]] = []
    for number in range(3):
        await ask(console, history, f"Question {number}", "sent-tokens")
    page = (await console.get("/console/sessions")).text
    assert '<th scope="col" class="n">Sent</th>' in page
    assert f'title="{3 * INPUT_TOKENS:,} tokens">7k<' in page


async def causes(http: httpx.AsyncClient, session: str) -> list[tuple[str, str]]:
    """The causes and details of the cache page, the first call first."""
    page = (await http.get("/console/session/cache", params={"id": session})).text
    return re.findall(r"</th><td>(.*?)</td><td>(.*?)</td>", html.unescape(page))[::-1]


async def test_edit_by_the_client_is_a_cause_of_its_own(console: httpx.AsyncClient) -> None:
    history: list[dict[str, Any]] = []
    for number in range(6):
        await ask(console, history, f"Question {number}: " + "the importer skips rows " * 40, "edited")
    found = await causes(console, "edited")
    assert {cause for cause, _ in found} == {"new epoch"}
    assert ("new epoch", EPOCH_REASONS["stride"]) in found
    history[0]["content"] = "Another first question"
    await ask(console, history, "And now?", "edited")
    assert (await causes(console, "edited"))[-1] == ("edited history", EPOCH_REASONS["edit"])


async def test_only_the_client_is_blamed_for_changed_instructions(console: httpx.AsyncClient) -> None:
    """Tersely adds instructions of its own with an epoch; here the epochs begin at calls 5 and 7."""
    history: list[dict[str, Any]] = []

    async def send(system: str, text: str) -> None:
        history.append({"role": "user", "content": text})
        body = {"model": "claude-sonnet-4-5", "max_tokens": 100, "system": system, "messages": history}
        answer = await console.post("/v1/messages", json=body, headers={"x-tersely-session": "system"})
        assert answer.status_code == 200, answer.text
        history.append({"role": "assistant", "content": answer.json()["content"]})

    for number in range(7):
        await send("Be brief.", f"Question {number}: " + "the importer skips rows " * 40)
    assert {cause for cause, _ in await causes(console, "system")} == {"new epoch"}
    await send("Be thorough.", "And now?")
    assert [cause for cause, _ in await causes(console, "system")] == ["new epoch", "new epoch", "changed instructions"]


def test_every_reason_of_an_epoch_is_explained() -> None:
    assert set(EPOCH_REASONS) == set(REASONS)
