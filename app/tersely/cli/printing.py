"""Print the output of commands. All commands print through this module.

Stored text is untrusted. On a terminal its control characters are escaped; otherwise text is printed unchanged. Colours
and progress are shown on terminals only, and only if they are not turned off.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Of a line that does not end where a terminal does.
WIDTH = 1_000_000
# Characters that begin escape sequences, and characters that reverse the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
# The ones of them that JSON does not escape, and lone surrogates, which no encoding accepts.
_NOT_IN_JSON = re.compile(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def print_json(value: Any) -> None:
    """Print readable JSON, with control characters escaped."""
    written = json.dumps(value, indent=2, ensure_ascii=(sys.stdout.encoding or "").lower() != "utf-8")
    print(_NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", written))


def print_text(text: str, *, end: str = "\n") -> None:
    """Print text; on a terminal with control characters escaped."""
    print(printable_on(sys.stdout, text), end=end, flush=True)


def print_error(message: str) -> None:
    """Print an error."""
    print(f"tersely: {printable_on(sys.stderr, message)}", file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, is_terse: bool = False) -> None:
    """A table; on anything but a terminal as wide as its content.

    ``is_terse``: a line for each row, the last column cut where a terminal ends.
    """
    from rich import box  # imported late, since it is slow and only tables need it
    from rich.table import Table
    from rich.text import Text

    console = _console(sys.stdout)
    table = Table(*columns, header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        cells = [Text("" if cell is None else printable_on(sys.stdout, str(cell))) for cell in row]
        if is_terse:
            cells[-1].no_wrap, cells[-1].overflow = True, "ellipsis"
        table.add_row(*cells)
    for column in table.columns[:-1] if is_terse else ():
        column.no_wrap = True
    console.print(table)


def printable_on(stream: TextIO, text: str) -> str:
    """Return the text for ``stream``: control characters are escaped if it is a terminal."""
    return escape_controls(text) if stream.isatty() else text


def escape_controls(text: str) -> str:
    """Return the text with its control characters written out, but for line ends and tabs."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_plain() -> bool:
    """Return whether the user, or the terminal, wants no colours, bold type or moving cursors (no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


@contextmanager
def show_progress(activity: str) -> Iterator[None]:
    """Show on a terminal what the command is waiting for."""
    if not sys.stderr.isatty():
        yield
    elif is_plain():
        print(f"{activity} ...", file=sys.stderr)
        yield
    else:
        with _console(sys.stderr).status(activity):
            yield


def _console(stream: TextIO) -> Console:
    from rich.console import Console  # see `print_table`

    width = None if stream.isatty() else WIDTH
    return Console(file=stream, width=width, highlight=False, color_system=None if is_plain() else "auto")


def print_stats(stats: Mapping[str, Any], now: datetime) -> None:
    """Print statistics of a session as Fifth prints them ("Metrics"), with the cost and the savings of its calls."""
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
    if stats.get("shadow"):  # a service of an earlier release has none
        print_text(f"\nWith {stats['shadow']['strategy']} {stats['shadow']['text']}.")
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
