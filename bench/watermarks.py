"""Prices of watermarks: `slim` over recorded conversations, under each pair of marks and several cache prices.

    python -m bench.watermarks [FILE.jsonl ...]   # measure, and write bench/watermarks.json (some minutes)
    make pictures                            # draw the curve and fill the table of docs/replay.md from it

As in `bench.simulate`: no server, tokens are characters / 4, a perfect prefix cache. The epoch policy decides with the
prices of its row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.simulate import PRICES, TRANSCRIPTS, RecordedHistory, SimulationTotals, load, simulate
from tersely.strategies.epochs.policies import Auto
from tersely.strategies.presets import Slim

MEASURED: Final = Path(__file__).with_name("watermarks.json")
FILES: Final = ("pi_sessions", "claude_code_sessions")
# Of a written and of a read token, relative to plain input: Anthropic, newer models of OpenAI, older ones, gpt-4o.
CACHE_PRICES: Final = ((1.25, 0.1), (1.0, 0.1), (1.0, 0.25), (1.0, 0.5))
HIGHS: Final = (20_000, 24_000, 28_000, 32_000, 40_000, 48_000, 64_000)
LOWS: Final = (8_000, 10_000, 12_000, 16_000, 24_000)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Input tokens by what they cost: read from the cache, or written."""

    read: float
    written: float

    def price(self, write: float, read: float) -> float:
        return self.written * write + self.read * read


def tokens_of(prices: Sequence[float]) -> Tokens:
    """Return the tokens behind the two prices of a tally."""
    (write, read), (other_write, other_read) = PRICES
    scale = write * other_read - other_write * read
    return Tokens(
        read=(write * prices[1] - other_write * prices[0]) / scale,
        written=(other_read * prices[0] - read * prices[1]) / scale,
    )


def measure(name: str, conversations: Sequence[RecordedHistory], policy: Auto) -> dict[str, Any]:
    """Play the conversations of a file under ``policy``; ``price`` is relative to sending everything."""
    tally = SimulationTotals()
    for conversation in conversations:
        tally.add(simulate(conversation, Slim(), policy))
    cut, whole = tokens_of(tally.price), tokens_of(tally.full_price)
    prices = policy.write_price, policy.read_price
    return {
        "file": name,
        "write": policy.write_price,
        "read": policy.read_price,
        "high": policy.high,
        "low": policy.low,
        "price": round(cut.price(*prices) / whole.price(*prices), 4),
        "ready": tally.ready,
        "edits": tally.edits,
        "lost": tally.lost_pointing,
        "pointing": tally.pointing,
    }


def main(arguments: Sequence[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [TRANSCRIPTS / f"{name}.jsonl" for name in FILES]
    if missing := [path for path in paths if not path.is_file()]:
        print(f"skipped: there is no {missing[0]}")
        return 0
    rows = []
    for path in paths:
        conversations = list(load(path))
        for write, read in CACHE_PRICES:
            for high in HIGHS:
                for low in (low for low in LOWS if low <= 0.6 * high):
                    policy = Auto(high=high, low=low, write_price=write, read_price=read)
                    rows.append(measure(path.stem, conversations, policy))
                    print(json.dumps(rows[-1]), flush=True)
    MEASURED.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
