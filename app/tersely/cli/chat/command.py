"""``tersely chat``: a conversation with a model through Tersely, with the commands of a chat."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from tersely.cli.chat.reply import read_reply
from tersely.cli.chat.terminal import is_terminal, read_lines, show_in_pager
from tersely.cli.connection import (
    LONG_LIMITS,
    MAIN,
    Key,
    Local,
    Service,
    ServiceTarget,
    SessionId,
    Url,
    check,
    path_of,
    session_path,
    with_service,
)
from tersely.cli.printing import print_error, print_text
from tersely.domain.chat_commands import HELP, is_command
from tersely.server.errors import CommandError
from tersely.strategies.summaries.activity_log import clip_line

LEAVE = frozenset({"/exit", "/quit"})
CONFLICT = 409
# Characters of a session's id in the prompt.
PROMPT = 40


def chat(
    model: Annotated[str, typer.Option(help="The model.")] = "gpt-4o-mini",
    session: SessionId = MAIN,
    strategy: Annotated[str | None, typer.Option(help="The session's strategy from now on: a name, or JSON.")] = None,
    upstream: Annotated[
        str | None, typer.Option(help="The model host (OpenAI's dialect), for working without a service.")
    ] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
) -> None:
    """Talk to a model through Tersely. OPENAI_API_KEY is passed on to its host; /help lists the commands.

    Ctrl-C stops a reply; on an empty line it leaves, as Ctrl-D and /exit do. From a pipe every line is a message, and
    the exit code is 1 if anything went wrong.
    """
    target = ServiceTarget(url=url, key=key, is_local=local, upstream=upstream)

    async def task(service: Service) -> bool:
        await _open(service, session, strategy)
        if is_terminal():
            print_text(f"Session {session}, model {model}. Type a message; /help lists the commands, /exit leaves.")
        return await _talk(Chat(service, session=session, model=model))

    is_fine = with_service(target, task)
    if not is_fine and not is_terminal():
        raise typer.Exit(1)


async def _open(service: Service, session: str, strategy: str | None) -> None:
    """Create the session with this strategy if it does not exist, so that commands work on it."""
    wanted = {} if strategy is None else {"strategy": strategy}
    try:
        await service.call("POST", path_of("sessions"), json={"id": session, **wanted})
    except CommandError as refused:
        if refused.status != CONFLICT:
            raise
        if wanted:
            await service.call("PATCH", session_path(session), json=wanted)


async def _talk(chat: Chat) -> bool:
    """Answer line by line until the user leaves; whether all went well."""
    read, is_fine = read_lines(f"{clip_line(chat.session, PROMPT)}> "), True
    with _ctrl_c() as stopping:
        while True:
            try:
                line = await read()
                if line is None or line.strip() in LEAVE:
                    return is_fine
                if not await stopping.run(chat.answer(line.strip())):
                    print_text("[stopped]")
                elif chat.to_show is not None:
                    await show_in_pager(chat.to_show)
            except CommandError as refused:
                print_error(str(refused))
                is_fine = False


class Chat:
    """A chat in one session with one model. ``to_show``: text of the last line to open in a pager."""

    def __init__(self, service: Service, *, session: str, model: str) -> None:
        self._service = service
        self.session = session
        self._model = model
        self.to_show: str | None = None

    async def answer(self, text: str) -> None:
        """Do as a line says. Raises `CommandError`."""
        self.to_show = None
        if not text:
            return
        if text == "/help":
            print_text(f"{HELP}\n/exit                     leave the chat")
        elif is_command(text):
            with self._service.refusing():
                path = session_path(self.session, "commands")
                answer = (await self._service.request("POST", path, json={"text": text}, timeout=LONG_LIMITS))["text"]
            if text.split() == ["/context", "show"]:
                self.to_show = answer
            else:
                print_text(answer)
        else:
            with self._service.refusing():
                await self._say(text)

    async def _say(self, text: str) -> None:
        """Send a message and print the reply as it arrives. Tersely keeps the history."""
        body = {"model": self._model, "stream": True, "messages": [{"role": "user", "content": text}]}
        request = self._service.http.stream(
            "POST", "/v1/chat/completions", json=body, headers=self._headers(), timeout=LONG_LIMITS
        )
        async with request as response:
            if response.status_code >= 400:
                await response.aread()
                check(response)
            end = "\n"
            try:
                async for piece in read_reply(response.aiter_lines()):
                    print_text(piece, end="")
                    end = "" if piece.endswith("\n") else "\n"
            finally:
                print_text("", end=end)

    def _headers(self) -> dict[bytes, bytes]:
        headers = {b"x-tersely-session": self.session.encode()}
        if key := os.environ.get("OPENAI_API_KEY", "").strip():
            headers[b"authorization"] = b"Bearer " + key.encode()
        return headers


class CancelOnInterrupt:
    """Let Ctrl-C cancel the work in progress instead of the chat."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Return whether the work came to its end."""
        self._work = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({self._work})
            if self._work.cancelled():
                return False
            self._work.result()
            return True
        finally:
            self._work.cancel()  # in case that the chat itself is ended
            self._work = None

    def stop(self) -> None:
        """Stop it."""
        if self._work is not None:
            self._work.cancel()


@contextmanager
def _ctrl_c() -> Iterator[CancelOnInterrupt]:
    """Ctrl-C at a terminal, for the length of the block; from a pipe it ends the command as ever."""
    stopping = CancelOnInterrupt()
    if not is_terminal():
        yield stopping
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopping.stop)
    try:
        yield stopping
    finally:
        loop.remove_signal_handler(signal.SIGINT)
