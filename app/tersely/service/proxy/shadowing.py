"""Turn an answered call into a job for its shadow."""

from __future__ import annotations

from functools import partial

from tersely.dialects.dialect import Dialect
from tersely.service.context.context_config import ContextConfig
from tersely.service.proxy.live_calls.live_call import LiveCall
from tersely.service.proxy.sending.sent_call import SentCall
from tersely.service.shadows.planning import AnsweredCall
from tersely.service.shadows.shadows import ShadowJob
from tersely.store.commit.records import ReplyWrite, StoredReply

# Bytes of memory that a waiting call takes for each byte of its history: body, messages, and parsed values.
HELD = 3
# The size of a history that is not in the body is estimated from its tokens.
BYTES_PER_TOKEN = 4


def shadow_job(sent: SentCall, write: ReplyWrite, stored: StoredReply | None, dialect: Dialect) -> ShadowJob | None:
    """Return the job for a stored call; None where no strategy is tried out, or where the call has no number yet."""
    config = _config(sent).shadow
    if config is None or stored is None:
        return None
    return ShadowJob(
        tenant=sent.call.tenant,
        session_id=stored.outcome.session_id,
        number=stored.outcome.call,
        edits=stored.state.edits,
        strategy=config.setting,
        dialect=dialect.name,
        report=write.report,
        started=write.started,
        size=HELD * max(len(sent.call.body), BYTES_PER_TOKEN * write.report.tokens_before),
        load=partial(_load, sent, write, config, dialect),
    )


def _config(sent: SentCall) -> ContextConfig:
    return sent.live.config if isinstance(sent, LiveCall) else sent.config


def _load(sent: SentCall, write: ReplyWrite, config: ContextConfig, dialect: Dialect) -> AnsweredCall:
    prepared = sent.expand(sent) if isinstance(sent, LiveCall) else sent
    replies = [each for each in write.replies if each.role == "assistant" and not each.is_alternative]
    return AnsweredCall(
        match=prepared.match,
        snapshot=prepared.loaded.snapshot,
        config=config,
        budget=prepared.budget,
        model=prepared.request.model,
        body=prepared.call.body,
        replies=[dialect.read_reply(each.model_raw or each.raw) for each in replies],
    )
