"""What the commands print: tables and figures for people. Colours and progress are for terminals only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.table import Table

out = Console(highlight=False)
_progress = Console(stderr=True)


def print_json(value: Any) -> None:
    """As JSON, readable."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_text(text: str) -> None:
    """As it is, without any markup being read into it."""
    out.print(text, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; on anything but a terminal as wide as its content."""
    table = Table(*columns, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) if cell is not None else "" for cell in row))
    out.print(table, soft_wrap=not out.is_terminal)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says what takes so long."""
    if not _progress.is_terminal:
        yield
        return
    with _progress.status(what):
        yield


def print_stats(stats: Mapping[str, Any], now: datetime) -> None:
    """Figures of a session as Fifth prints them ("Metrics"), and what its calls have cost and spared."""
    tiered, summaries = stats["tiered"], stats["summaries"]
    print_text("Context Manager Stats\n" + "─" * 21)
    used = f"{stats['live_tokens']:,}"
    if tiered:
        used = f"{tiered['tokens']:,} / {tiered['budget']:,} ({tiered['share']:.0%})"
    lines = {"Total tokens used:": used, "Messages stored:": f"{stats['messages']:,}", "Summaries:": summaries["total"]}
    if summaries["compression_ratio"] is not None:
        lines["Compression ratio:"] = f"{summaries['compression_ratio']:.1f}x average"
    if stats["calls"]:
        share = "" if stats["saved_share"] is None else f" ({stats['saved_share']:.0%})"
        lines |= {"Calls:": f"{stats['calls']:,}", "Tokens saved:": f"{stats['saved']:,}{share}"}
    for name, value in lines.items():
        print_text(f"{name:<22} {value}")
    if tiered:
        print_text("\nLevel breakdown:")
        for level in tiered["levels"]:
            budget = "" if level["budget"] is None else f" / {level['budget']:,}"
            print_text(f"  {level['name'].title() + ':':<11} {level['tokens']:>6,}{budget} tokens")
    if summaries["last_at"]:
        print_text(f"\nLast compression:  {ago(now - datetime.fromisoformat(summaries['last_at']).astimezone(UTC))}")
    if tiered:
        found = tiered["retrieved"]
        print_text(f"Retrieved items:   {len(found)}" + (f" ({', '.join(found)})" if found else ""))


def ago(span: timedelta) -> str:
    """``2 minutes ago``."""
    seconds = max(0, int(span.total_seconds()))
    for name, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = seconds // size
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "just now"
