"""Which model writes a summary, and asking it: one plain question, one answer, within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.dialects.asking import Asking, read_answer
from app.dialects.registry import ASKING, DIALECTS
from app.domain.errors import UpstreamUnavailable
from app.domain.messages import Dialect as DialectName
from app.domain.models import usable_window
from app.service.metrics import Metrics
from app.service.summary_jobs import Job
from app.strategies.summarizing import Answer, Ask
from app.upstream.client import Upstream

# As a model's name: whatever model the session itself uses.
SESSION = "session"
MAX_REPLY = 4 * 1024 * 1024
MAX_NAME = 200
HEADERS = (
    ("content-type", "application/json"),
    ("accept", "application/json"),
    ("accept-encoding", "identity"),
)


class ModelFailed(Exception):
    """A model could not be asked, or gave no answer. The reason is a fixed text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A model host and the operator's key for it, if there is one."""

    upstream: Upstream
    dialect: DialectName = "openai_chat"
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A model that may be asked, and how."""

    model: str
    host: Host
    asking: Asking
    credentials: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """The model as it is stored."""
        return self.model[:MAX_NAME].encode(errors="replace").decode().replace("\0", "?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizerConfig:
    """``model`` None: none; `SESSION`: the session's own. ``timeout`` in seconds for one call, ``output`` and
    ``window`` in tokens of an answer and of a whole call.
    """

    model: str | None = None
    timeout: float = 60.0
    output: int = 4_096
    window: int = 32_000


class Models:
    """The summarizer's own host, if it has one, and the hosts of the sessions by dialect."""

    def __init__(
        self, config: SummarizerConfig, *, own: Host | None, hosts: Mapping[DialectName, Host], metrics: Metrics
    ) -> None:
        self.config = config
        self._own = own
        self._hosts = hosts
        self._metrics = metrics

    def choose(self, job: Job) -> Chosen | None:
        """The model for a job; None where none is configured, or where nobody's key is there to pay for it."""
        model = job.model if self.config.model == SESSION else self.config.model
        host = self._own or self._hosts.get(job.dialect)
        asking = ASKING.get(host.dialect) if host else None
        if not model or host is None or asking is None:
            return None
        credentials = tuple(asking.authorize(host.api_key)) if host.api_key else ()
        if self._own is None and not credentials:
            credentials = job.credentials
            if not credentials:
                return None
        return Chosen(model=model, host=host, asking=asking, credentials=credentials)

    def window(self, chosen: Chosen) -> int:
        """Tokens that may go into one call, the answer not counted."""
        room = self.config.window - self.config.output
        known = usable_window(chosen.model, self.config.output)
        return max(1, room if known is None else min(room, known))

    async def ask(self, chosen: Chosen, question: Ask) -> Answer:
        """The model's answer. Raises `ModelFailed`."""
        request = chosen.asking.write(
            model=chosen.model,
            instructions=question.instructions,
            message=question.message,
            max_tokens=self.config.output,
        )
        try:
            async with asyncio.timeout(self.config.timeout):
                status, body = await self._exchange(chosen, request.path, request.body)
        except TimeoutError:
            raise ModelFailed("no answer in time") from None
        except UpstreamUnavailable:
            raise ModelFailed("the host cannot be reached") from None
        if status != 200:
            raise ModelFailed(f"status {status}")
        try:
            said = read_answer(DIALECTS[chosen.host.dialect], body)
        except ValueError:
            raise ModelFailed("no reply") from None
        for kind, count in (("input", said.input_tokens), ("output", said.output_tokens)):
            self._metrics.summarizer_tokens.labels(kind).inc(max(0, count or 0))
        return Answer(text=said.text, finish=said.finish, has_calls=said.has_calls)

    async def _exchange(self, chosen: Chosen, path: str, body: bytes) -> tuple[int, bytes]:
        reply = await chosen.host.upstream.send("POST", path, [*HEADERS, *chosen.credentials], body)
        try:
            reply.unpack()
            return reply.status, await reply.read(MAX_REPLY)
        finally:
            reply.close()
