"""A whole replay: every file under every strategy, against a service that is started here or that runs already."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from tersely.fakellm.scripted import run_scripted
from tersely.replay.checks import CheckFailure, StoredClientMessage
from tersely.replay.lost_references import PastIdentifiers
from tersely.replay.measure import Counter, ReplayTotals
from tersely.replay.model import RecordedModel
from tersely.replay.play import PlayedConversation, ReplaySetting, Variant, play
from tersely.replay.service import ReplayTenants, database_for_replay, open_tenants, run_service
from tersely.replay.stored_sessions import read_session
from tersely.replay.table import ReplayResult
from tersely.settings import Settings
from tersely.store.db.migrations import migrate
from tersely.transcripts.conversations import BadTranscript, Conversation, Transcript

OnCall = Callable[[str], None]
TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """The transcripts and variants to play."""

    transcripts: Sequence[Transcript]
    variants: Sequence[Variant]
    share: float
    model: str
    window: int
    parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAccess:
    """The way of a file's conversations to the service under one strategy."""

    headers_for: Callable[[Conversation], Mapping[str, str]]
    read: Callable[[str], Awaitable[Sequence[StoredClientMessage]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One transcript under one strategy."""

    stage: ReplaySetting
    variant: Variant
    transcript: Transcript


_OpenAccess = Callable[[_Run], Awaitable[ReplayAccess]]


def run_here(runner: asyncio.Runner, settings: Settings, plan: ReplayPlan, on_call: OnCall) -> list[ReplayResult]:
    """Replay against a service of its own, whose tenants are deleted afterwards."""
    with database_for_replay(settings) as url:
        runner.run(migrate(url))
        return runner.run(_run_here(settings, url, plan, on_call))


async def _run_here(settings: Settings, url: str, plan: ReplayPlan, on_call: OnCall) -> list[ReplayResult]:
    model = RecordedModel(window=plan.window)
    async with (
        run_scripted(model=model) as upstream,
        open_tenants(url) as tenants,
        run_service(settings, url, upstream.base_url) as address,
    ):
        return await _run(plan, on_call, address, model, lambda _: _open_tenant(tenants))


async def _open_tenant(tenants: ReplayTenants) -> ReplayAccess:
    tenant, key = await tenants.make()
    return ReplayAccess(
        headers_for=lambda _: {"x-tersely-key": key},
        read=lambda session_id: tenants.read(tenant, session_id),
    )


async def run_there(
    plan: ReplayPlan, on_call: OnCall, *, address: str, port: int, headers: Mapping[str, str]
) -> list[ReplayResult]:
    """Replay against a running service, whose upstream must be the one on ``port``.

    Sessions of earlier replays would be recognised, so each session is named here. A client's own requests have their
    own names: raises `BadTranscript` for recordings.
    """
    for transcript in plan.transcripts:
        if any(conversation.is_recording for conversation in transcript.conversations):
            raise BadTranscript(f"{transcript.name}: a recording is played through a Tersely of its own, not --proxy")
    model = RecordedModel(window=plan.window)
    token = secrets.token_hex(4)

    async def open_access(run: _Run) -> ReplayAccess:
        index = plan.variants.index(run.variant)
        name = f"replay-{token}-{index}-{run.transcript.name}"
        return ReplayAccess(
            headers_for=lambda conversation: {**headers, "x-tersely-session": f"{name}-{conversation.number}"},
            read=lambda session_id: read_session(run.stage.http, address, session_id, headers),
        )

    async with run_scripted(port=port, model=model):
        return await _run(plan, on_call, address, model, open_access)


async def _run(
    plan: ReplayPlan, on_call: OnCall, address: str, model: RecordedModel, open_access: _OpenAccess
) -> list[ReplayResult]:
    results: list[ReplayResult] = []
    counter = Counter(plan.model)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http:
        stage = ReplaySetting(
            http=http, address=address, model=model, model_name=plan.model, share=plan.share, counter=counter
        )
        for transcript in plan.transcripts:
            pasts = {each.number: PastIdentifiers() for each in transcript.conversations}
            for variant in plan.variants:
                run = _Run(stage=stage, variant=variant, transcript=transcript)
                played = await _play_all(run, pasts, await open_access(run), on_call, parallel=plan.parallel)
                results.append(_result(transcript, variant, played))
    return results


async def _play_all(
    run: _Run, pasts: Mapping[int, PastIdentifiers], access: ReplayAccess, on_call: OnCall, *, parallel: int
) -> list[PlayedConversation]:
    """Play up to ``parallel`` conversations at a time.

    Those that begin alike are played one after another: no words tell which of two is continued by a request that
    comes before the other's.
    """
    free = asyncio.Semaphore(parallel)
    variant, transcript = run.variant, run.transcript
    alike: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def one(conversation: Conversation) -> PlayedConversation:
        async with alike[_first_reply(conversation)], free:
            return await play(
                run.stage,
                variant,
                conversation,
                pasts[conversation.number],
                headers=access.headers_for(conversation),
                read_store=access.read,
                progress=lambda: on_call(f"{transcript.name} {variant.name}"),
            )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(conversation)) for conversation in transcript.conversations]
    return [task.result() for task in tasks]


def _first_reply(conversation: Conversation) -> str:
    """Return the reply by which conversations with equal questions can begin alike."""
    reply = next((step.reply for step in conversation.steps), None)
    return f"number {conversation.number}" if reply is None else json.dumps(reply)


def _result(transcript: Transcript, variant: Variant, played: Sequence[PlayedConversation]) -> ReplayResult:
    failures = [failure for each in played for failure in each.failures]
    sessions = [session for each in played for session in each.sessions]
    if len(set(sessions)) < len(sessions):
        failures.append(
            CheckFailure(
                strategy=variant.name,
                conversation=transcript.name,
                call=-1,
                what=f"{len(sessions)} conversations share {len(set(sessions))} sessions",
            )
        )
    return ReplayResult(
        file=transcript.name,
        strategy=variant.name,
        tally=sum((each.tally for each in played), ReplayTotals()),
        failures=tuple(failures),
        worst=max((each.tally.price(0) for each in played if each.tally.calls), default=0.0),
    )
