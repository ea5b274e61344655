"""Choose the model that writes a summary, and call it: one question, one answer, within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tersely.dialects.completion import CompletionFormat, read_completion
from tersely.dialects.registry import COMPLETIONS, DIALECTS
from tersely.domain.errors import UpstreamUnavailable
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.models import usable_window
from tersely.domain.text.encodable import encodable
from tersely.service.common.metrics import Metrics
from tersely.service.common.replay_tenants import is_replay_tenant
from tersely.service.summaries.jobs import Job
from tersely.strategies.summaries.summarizing import SummaryQuestion, SummaryReply
from tersely.upstream.client import Upstream

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
class NamedHost:
    """A further model host: the dialects of its sessions, and patterns of the models that it serves.

    ``host`` is None if summaries cannot be requested there. Without patterns it may serve any model.
    """

    host: Host | None
    dialects: tuple[DialectName, ...]
    models: tuple[str, ...] = ()

    def serves(self, model: str) -> bool:
        """Return whether a pattern fits the model."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedModel:
    """A model that may be asked, and how."""

    model: str
    host: Host
    completion: CompletionFormat
    credentials: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """Return the model's name as it is stored."""
        return encodable(self.model[:MAX_NAME]).replace("\0", "?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizerConfig:
    """``model`` None: no model; `SESSION`: the session's own. ``timeout`` in seconds for one call; ``output`` and
    ``window`` in tokens of an answer and of a whole call.

    ``daily_calls`` and ``daily_tokens`` limit the use by one session in a day (UTC); 0: no limit. Prices are in USD per
    million tokens; None: unknown.
    """

    model: str | None = None
    timeout: float = 60.0
    output: int = 4_096
    window: int = 32_000
    daily_calls: int = 0
    daily_tokens: int = 0
    input_price: float | None = None
    output_price: float | None = None

    def price_of(self, input_tokens: int, output_tokens: int) -> float | None:
        """Return the cost of these tokens in USD; None if no price is known."""
        if self.input_price is None or self.output_price is None:
            return None
        return (input_tokens * self.input_price + output_tokens * self.output_price) / 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """A model's answer, with the tokens that the host reported; None if it did not."""

    reply: SummaryReply
    input_tokens: int | None
    output_tokens: int | None


class Models:
    """The summarizer's own host, if it has one, and the hosts of the sessions by dialect."""

    def __init__(
        self,
        config: SummarizerConfig,
        *,
        own: Host | None,
        hosts: Mapping[DialectName, Host],
        metrics: Metrics,
        named: Mapping[str, NamedHost] | None = None,
    ) -> None:
        """``named`` are the further hosts by their names."""
        self.config = config
        self._named = named or {}
        self._own = own
        self._hosts = hosts
        self._metrics = metrics

    def select(self, job: Job) -> SelectedModel | None:
        """Return the model for a job; None if none is configured, or if no key is available for it."""
        if is_replay_tenant(job.tenant):
            return None  # a replay sends nothing to anybody
        model = job.model if self.config.model == SESSION else self.config.model
        host = self._own or self._host_of(job, model or "")
        completion = COMPLETIONS.get(host.dialect) if host else None
        if not model or host is None or completion is None:
            return None
        credentials = tuple(completion.authorize(host.api_key)) if host.api_key else ()
        if self._own is None and not credentials:
            credentials = job.credentials
            if not credentials:
                return None
        return SelectedModel(model=model, host=host, completion=completion, credentials=credentials)

    def _host_of(self, job: Job, model: str) -> Host | None:
        """Return the host of the job's session. If the job does not name it, the session's model decides."""
        if job.host:
            named = self._named.get(job.host)
        else:
            fits = (each for each in self._named.values() if job.dialect in each.dialects and each.serves(job.model))
            named = next(fits, None)
            if named is None:
                return self._hosts.get(job.dialect)
        if named is None or (named.models and not named.serves(model)):
            return None
        return named.host

    def reason_for_none(self, job: Job) -> str:
        """Return why `select` returns no model for ``job`` although one is configured; empty if none is."""
        if self.config.model is None or self.select(job) is not None:
            return ""
        if not (job.model if self.config.model == SESSION else self.config.model):
            return "no model is known: the session has made no call yet"
        model = job.model if self.config.model == SESSION else self.config.model
        host = self._own or self._host_of(job, model)
        if host is None or host.dialect not in COMPLETIONS:
            where = f"the host {job.host}" if job.host else f"no host of the dialect {job.dialect}"
            return f"{where} can{'not' if job.host else ''} be asked for a summary"
        return "no key is there for the summarizer's model: set TERSELY_SUMMARIZER_API_KEY, or the host's own key"

    def window(self, chosen: SelectedModel) -> int:
        """The tokens that one call may have, without the answer."""
        room = self.config.window - self.config.output
        known = usable_window(chosen.model, self.config.output)
        return max(1, room if known is None else min(room, known))

    async def ask(self, chosen: SelectedModel, question: SummaryQuestion) -> ModelAnswer:
        """Return the model's answer. Raises `ModelFailed`."""
        try:
            answered = await self._ask(chosen, question)
        except ModelFailed:
            self._metrics.summarizer_calls.labels("failed").inc()
            raise
        self._metrics.summarizer_calls.labels("answered").inc()
        return answered

    async def _ask(self, chosen: SelectedModel, question: SummaryQuestion) -> ModelAnswer:
        request = chosen.completion.write(
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
            reply = read_completion(DIALECTS[chosen.host.dialect], body)
        except ValueError:
            raise ModelFailed("no reply") from None
        for kind, count in (("input", reply.input_tokens), ("output", reply.output_tokens)):
            self._metrics.summarizer_tokens.labels(kind).inc(max(0, count or 0))
        return ModelAnswer(
            reply=SummaryReply(text=reply.text, finish=reply.finish, has_calls=reply.has_calls),
            input_tokens=reply.input_tokens,
            output_tokens=reply.output_tokens,
        )

    async def _exchange(self, chosen: SelectedModel, path: str, body: bytes) -> tuple[int, bytes]:
        reply = await chosen.host.upstream.send("POST", path, [*HEADERS, *chosen.credentials], body)
        try:
            reply.unpack(MAX_REPLY)
            return reply.status, await reply.read(MAX_REPLY)
        finally:
            reply.close()
