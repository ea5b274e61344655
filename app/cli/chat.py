"""``tersely chat``: a conversation with a model through Tersely, with the commands of a chat."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from app.cli.printing import out, print_text
from app.cli.reaching import Key, Local, Place, Service, SessionId, Url, check, session_path, work
from app.cli.serving import Refused
from app.domain.chat_commands import HELP, is_command

LEAVE = frozenset({"/exit", "/quit"})


def chat(
    model: Annotated[str, typer.Option(help="The model.")] = "gpt-4o-mini",
    session: SessionId = "main",
    strategy: Annotated[str | None, typer.Option(help="A strategy for this chat: a name, or JSON.")] = None,
    upstream: Annotated[
        str | None, typer.Option(help="The model host (OpenAI's dialect), for working without a service.")
    ] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
) -> None:
    """Talk to a model through Tersely. OPENAI_API_KEY is passed on to its host; /help lists the commands."""
    headers = {"x-tersely-session": session}
    if os.environ.get("OPENAI_API_KEY"):
        headers["authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    if strategy is not None:
        headers["x-tersely-strategy"] = strategy

    async def talk(service: Service) -> None:
        while (line := _read_line()) is not None:
            text = line.strip()
            if text in LEAVE:
                return
            if not text:
                continue
            try:
                if text == "/help":
                    print_text(f"{HELP}\n/exit                     leave")
                elif is_command(text):
                    done = await service.ask("POST", session_path(session, "commands"), json={"text": text})
                    print_text(done["text"])
                else:
                    await _say(service, model, text, headers)
            except Refused as error:
                print(f"tersely: {error}", file=sys.stderr)

    work(Place(url=url, key=key, is_local=local, upstream=upstream), talk)


def _read_line() -> str | None:
    """What is typed next; None at the end. Nobody else waits meanwhile."""
    try:
        return input("> " if out.is_terminal else "")
    except (EOFError, KeyboardInterrupt):
        return None


async def _say(service: Service, model: str, text: str, headers: dict[str, str]) -> None:
    """Send what was typed, and print the reply as it comes. The history is Tersely's affair."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": text}]}
    async with service.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code >= 400:
            await response.aread()
            check(response)
        async for line in response.aiter_lines():
            print(_piece(line), end="", flush=True)
    print()


def _piece(line: str) -> str:
    """The text in a line of the stream."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return ""
    try:
        choices = json.loads(line[5:]).get("choices") or [{}]
        return str(choices[0].get("delta", {}).get("content") or "")
    except (ValueError, AttributeError):
        return ""
