"""The results of a replay as a table: for people on a terminal, as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tersely.domain.history.context_use import Edits
from tersely.replay.checks import CheckFailure
from tersely.replay.measure import PRICES, ReplayTotals, repeated_share

COLUMNS = (
    "file",
    "strategy",
    "conversations",
    "calls",
    "tokens, client",
    "tokens, sent",
    "sent",
    "repeated prefix",
    *(f"price {write:g}/{read:g}" for write, read in PRICES),
    "own instructions",
    "lost references",
    "lost, pointed at",
    "edit readiness",
    "epochs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A file under a strategy. ``worst`` is the price of the conversation that fared worst, by the first prices."""

    file: str
    strategy: str
    tally: ReplayTotals
    failures: Sequence[CheckFailure] = ()
    worst: float = 0.0


def cells(result: ReplayResult) -> tuple[str, ...]:
    """Return one row of the table."""
    tally = result.tally
    return (
        result.file,
        result.strategy,
        f"{tally.conversations}",
        f"{tally.calls:,}" + (f" + {tally.beside:,} beside" if tally.beside else ""),
        f"{tally.client.tokens:,}",
        f"{tally.model.tokens:,}",
        f"{tally.sent_share:.2f}",
        _percent(repeated_share(tally.model)),
        *(f"{tally.price(index):.3f}" for index in range(len(PRICES))),
        " / ".join(f"+{tally.own_price(index):.3f}" for index in range(len(PRICES))) if any(tally.model.own) else "0",
        _lost(tally.losses.lost, tally.losses.referring),
        _lost(tally.losses.lost_pointing, tally.losses.pointing),
        _ready(tally.edits),
        f"{tally.epochs:,}",
    )


def as_markdown(results: Sequence[ReplayResult]) -> str:
    """Return the whole table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines += [f"| {' | '.join(cells(result))} |" for result in results]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """Return the figures, unrounded."""
    return [_record(result) for result in results]


def _record(result: ReplayResult) -> dict[str, Any]:
    tally = result.tally
    times = sorted(tally.overhead_ms)
    return {
        "file": result.file,
        "strategy": result.strategy,
        "conversations": tally.conversations,
        "calls": tally.calls,
        "calls_beside": tally.beside,
        "client_tokens": tally.client.tokens,
        "sent_tokens": tally.model.tokens,
        "client_prefix_share": repeated_share(tally.client),
        "prefix_share": repeated_share(tally.model),
        "prices": [
            {
                "write": write,
                "read": read,
                "price": tally.price(index),
                "own_instructions": tally.own_price(index),
            }
            for index, (write, read) in enumerate(PRICES)
        ],
        "referring_calls": tally.losses.referring,
        "lost_references": tally.losses.lost,
        "pointing_calls": tally.losses.pointing,
        "lost_pointing": tally.losses.lost_pointing,
        "edits": tally.edits.calls,
        "edits_ready": tally.edits.ready,
        "epochs": tally.epochs,
        "overflows_mended": tally.overflows,
        "worst_conversation": result.worst,
        "overhead_ms": {"p50": median(times), "max": times[-1]} if times else None,
        "failures": [
            {"conversation": failure.conversation, failure.unit: failure.call, "what": failure.what}
            for failure in result.failures
        ],
    }


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


def _lost(lost: int, referring: int) -> str:
    return f"{100 * lost / referring:.1f} % of {referring}" if referring else "none refer"


def _ready(edits: Edits) -> str:
    return "none" if edits.readiness is None else f"{edits.readiness:.3f} of {edits.calls}"
