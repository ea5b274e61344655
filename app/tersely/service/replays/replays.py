"""Plays transcripts through the proxy's own code, with the recorded replies in place of a model.

What a replay stores lies under a tenant of its own (`replay_tenant`): it is in no list, figure or limit of the tenant
that looks at it. The newest `KEPT` replays are kept.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tersely.dialects.wire import raw_json
from tersely.domain.errors import Busy, InvalidRequest, NotFound, TerselyError
from tersely.domain.messages import Dialect as DialectName
from tersely.service.common.replay_tenants import replay_tenant
from tersely.service.context.context_configs import SHADOW_OFF
from tersely.service.proxy.call.call import Call, CallOptions
from tersely.service.proxy.proxy import Proxy
from tersely.service.replays.recorded_host import RecordedHost
from tersely.service.sessions.sessions import SessionChange, Sessions
from tersely.store.history.session_lists import SessionFilter
from tersely.transcripts.conversations import BadTranscript, Conversation, RecordedCall, ReplyForm, Transcript
from tersely.transcripts.files import load_transcript
from tersely.transcripts.recordings import going_on_from
from tersely.upstream.client import Upstream
from tersely.upstream.in_process import InProcessUpstream

_log = logging.getLogger(__name__)

MAX_BYTES = 32 * 1024 * 1024
MAX_CONVERSATIONS = 20
MAX_CALLS = 3_000
MAX_SECONDS = 180.0
KEPT = 20
DEFAULT_MODELS: dict[DialectName, str] = {
    "openai_chat": "gpt-5",
    "openai_responses": "gpt-5",
    "anthropic": "claude-sonnet-4-5",
    "gemini": "gemini-2.5-pro",
    "gemini_gca": "gemini-2.5-pro",
}
"""Models whose prices count where a transcript names none."""

ProxyFactory = Callable[[DialectName, Upstream, Callable[[], datetime]], Proxy]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of a replay. Empty strings stand for the service's configuration, and for the transcript's model."""

    strategy: str = ""
    epoch: str = ""
    model: str = ""


@dataclass(slots=True, kw_only=True)
class Replay:
    """A replay, running or ended. ``trouble``: why it ended before the last call."""

    tenant: str
    name: str
    calls: int
    played: int = 0
    sessions: list[str] = field(default_factory=list)
    trouble: str = ""
    is_done: bool = False


class RecordedTimes:
    """A clock that keeps the transcript's pauses between calls; the time of the last call is now."""

    def __init__(self, steps: Sequence[RecordedCall], clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._last = max((step.at for step in steps if step.at is not None), default=None)
        self._at: datetime | None = None
        self._behind = timedelta()

    def move_to(self, step: RecordedCall) -> float:
        """Go to the next call. Return the seconds since the call before it; 0 if unknown."""
        if step.at is None or self._last is None:
            return 0.0
        before, self._at = self._at, step.at if self._at is None else max(self._at, step.at)
        self._behind = self._last - self._at
        return 0.0 if before is None else (self._at - before).total_seconds()

    def now(self) -> datetime:
        """Return the time."""
        return self._clock() - self._behind


class Replays:
    """Plays transcripts, one at a time."""

    def __init__(
        self,
        sessions: Sessions,
        open_proxy: ProxyFactory,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        new_id: Callable[[], str],
        lifetime: float,
    ) -> None:
        """``open_proxy`` makes a proxy of a dialect in front of a host, with a clock. ``lifetime``: seconds that a
        provider's cache stays warm.
        """
        self._sessions = sessions
        self._open_proxy = open_proxy
        self._clock = clock
        self._monotonic = monotonic
        self._new_id = new_id
        self._lifetime = lifetime
        self._task: asyncio.Task[None] | None = None

    async def read(self, name: str, content: bytes) -> Transcript:
        """Read a transcript. Raises `InvalidRequest` for any other file, and for one without a call."""
        if len(content) > MAX_BYTES:
            raise InvalidRequest(f"the file has more than {MAX_BYTES // 2**20} MiB", field="file")
        transcript = await asyncio.to_thread(_read, name, content)
        if not any(conversation.steps for conversation in transcript.conversations):
            raise InvalidRequest("the file holds no reply of a model, so there is no call to show", field="file")
        return transcript

    async def start(self, tenant: str, transcript: Transcript, options: ReplayOptions) -> Replay:
        """Start a replay in the background.

        Raises `Busy` while another one is played, `InvalidRequest` for an unknown strategy or epoch policy.
        """
        if self._task is not None and not self._task.done():
            raise Busy("another transcript is being played: try again in a moment")
        self._sessions.check_settings(options.strategy or None, options.epoch or None)
        owner = replay_tenant(tenant)
        conversations = [each for each in transcript.conversations if each.steps][:MAX_CONVERSATIONS]
        calls = sum(len(each.steps) for each in conversations)
        replay = Replay(tenant=owner, name=transcript.name, calls=calls)
        self._task = asyncio.get_running_loop().create_task(self._run(replay, conversations, options))
        return replay

    async def wait(self, replay: Replay, seconds: float) -> None:
        """Wait until a replay has ended, or for so many seconds."""
        if self._task is not None and not replay.is_done:
            await asyncio.wait({self._task}, timeout=seconds)

    async def close(self) -> None:
        """End the replay that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, replay: Replay, conversations: list[Conversation], options: ReplayOptions) -> None:
        try:
            await self._make_room(replay.tenant, recordings=any(each.is_recording for each in conversations))
            async with asyncio.timeout(MAX_SECONDS):
                for conversation in conversations:
                    await self._play(replay, conversation, options)
        except TimeoutError:
            replay.trouble = f"it took longer than {MAX_SECONDS:.0f} s"
        except TerselyError as error:
            replay.trouble = error.detail
        except Exception:  # noqa: BLE001 nobody waits for the task: what failed is logged and shown
            replay.trouble = "something went wrong inside Tersely; its log says what"
            _log.exception("a replay failed")
        finally:
            replay.is_done = True
        if replay.trouble:
            await self._note_trouble(replay)

    async def _make_room(self, tenant: str, *, recordings: bool) -> None:
        """Delete the oldest replays. A recording would continue the sessions of an earlier replay: delete these too."""
        found, _ = await self._sessions.page(tenant, SessionFilter(), sort="created", after=None, limit=200)
        old = found[KEPT - 1 :]
        if recordings:
            old = [each for each in found if each in old or each.session.metadata in (b"", b"{}", b"null")]
        for each in old:
            try:
                await self._sessions.delete(tenant, each.session.id)
            except NotFound:
                continue  # deleted with its parent

    async def _play(self, replay: Replay, conversation: Conversation, options: ReplayOptions) -> None:
        model = options.model or conversation.model or DEFAULT_MODELS[conversation.steps[0].dialect]
        host = RecordedHost(model)
        upstream = InProcessUpstream(host.respond)
        proxies: dict[DialectName, Proxy] = {}
        times = RecordedTimes(conversation.steps, self._clock)
        session_id = None if conversation.is_recording else self._new_id()
        if session_id is not None:
            await self._create(replay, session_id, conversation)
        reply_ids: dict[int, str] = {}
        for step in conversation.steps:
            if replay.played >= MAX_CALLS:
                replay.trouble = f"only the first {MAX_CALLS:,} calls are played"
                return
            request = step.request(ReplyForm(model=model))
            if step.follows is not None and step.follows in reply_ids:
                request = going_on_from(request, reply_ids[step.follows])
            proxy = proxies.get(step.dialect)
            if proxy is None:
                proxy = proxies[step.dialect] = self._open_proxy(step.dialect, upstream, times.now)
            host.expect(step, is_cold=times.move_to(step) > self._lifetime)
            call = Call(
                tenant=replay.tenant,
                method="POST",
                path=request.target,
                headers=[("content-type", "application/json"), *request.headers.items()],
                body=request.body,
                options=CallOptions(
                    session_id=session_id,
                    strategy=options.strategy or None,
                    epoch=options.epoch or None,
                    shadow=SHADOW_OFF,
                ),
                received=self._monotonic(),
                model=f"models/{model}" if step.dialect == "gemini" else "",
            )
            await self._call(replay, proxy, call, step, reply_ids)
            replay.played += 1
            await asyncio.sleep(0)

    async def _call(
        self, replay: Replay, proxy: Proxy, call: Call, step: RecordedCall, reply_ids: dict[int, str]
    ) -> None:
        answer = await proxy.converse(call)
        body = answer.body
        if answer.chunks is not None:
            body = b"".join([chunk async for chunk in answer.chunks])
        if answer.status != 200:
            raise InvalidRequest(f"call {replay.played + 1} was refused with status {answer.status}")
        session = next((value for name, value in answer.headers if name == "x-tersely-session"), "")
        if session and session not in replay.sessions:
            replay.sessions.append(session)
        if step.dialect == "openai_responses":
            members: Any = raw_json.load(body)
            if isinstance(members, dict) and isinstance(members.get("id"), str):
                reply_ids[step.index] = members["id"]

    async def _create(self, replay: Replay, session_id: str, conversation: Conversation) -> None:
        metadata = {"replay": {"file": replay.name, "calls": len(conversation.steps)}}
        await self._sessions.create(
            replay.tenant, session_id=session_id, parent=None, given=SessionChange(metadata=metadata)
        )
        replay.sessions.append(session_id)

    async def _note_trouble(self, replay: Replay) -> None:
        if not replay.sessions:
            return
        try:
            metadata = {"replay": {"file": replay.name, "trouble": replay.trouble[:400]}}
            await self._sessions.change(replay.tenant, replay.sessions[-1], SessionChange(metadata=metadata))
        except TerselyError:
            _log.warning("the error of a replay could not be stored")


def _read(name: str, content: bytes) -> Transcript:
    """Read a transcript from a file in an empty directory, so that it can name no other file."""
    plain = re.sub(r"[^\w.-]+", "-", name)[-100:].lstrip(".-") or "transcript.jsonl"
    with tempfile.TemporaryDirectory(prefix="tersely-") as directory:
        path = Path(directory) / plain
        path.write_bytes(content)
        try:
            return load_transcript(path)
        except BadTranscript as error:
            message = str(error).replace(f"{directory}/", "")
            raise InvalidRequest(f"not a transcript: {message[:400]}", field="file") from error
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise InvalidRequest("the transcript cannot be read", field="file") from error
