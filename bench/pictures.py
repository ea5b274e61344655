"""Draw the pictures of README and docs, and fill the tables of docs/replay.md, from measurements in the repository.

``make pictures`` draws from ``bench/epochs.json`` and ``bench/replay.json``. Two options measure anew::

    python -m bench.pictures --epochs TRANSCRIPTS   # play the first conversation through a service of its own
    python -m bench.pictures --results FILE...      # take over the output of ``tersely replay --json``
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import httpx

ROOT = Path(__file__).resolve().parents[1]
EPOCHS = ROOT / "bench" / "epochs.json"
RESULTS = ROOT / "bench" / "replay.json"
WATERMARKS = ROOT / "bench" / "watermarks.json"
PICTURES = ROOT / "docs" / "pictures"
README = ROOT / "README.md"
REPLAY_PAGE = ROOT / "docs" / "replay.md"
COMMAND = str(Path(sys.executable).with_name("tersely"))
STRATEGIES = ("slim", "window", "trim", "compact", "tiered")
POLICIES = ("auto", "every_request")

# Colours for light and dark pages; every picture brings its own background.
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .small { font-size: 11px; fill: #59636e }  .bold { font-weight: 600 }
  .page { fill: #ffffff }  .box { fill: #f6f8fa; stroke: #8c959f }  .axis, .arrow { stroke: #59636e; fill: none }
  .tip { fill: #59636e }  .grid { stroke: #d1d9e0 }  .mark { stroke: #8c959f; stroke-dasharray: 3 4 }
  .everything { stroke: #818b98; fill: none; stroke-width: 2 }  .everything-box { fill: #818b98 }
  .cached { fill: #54aeff }  .fresh { fill: #bc4c00 }  .auto { fill: #0969da }  .each { fill: #d4a72c }
  .curve { fill: none; stroke-width: 2 }  .first { stroke: #0969da }  .second { stroke: #bc4c00 }
  .third { stroke: #1a7f37 }  .fourth { stroke: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }  .small { fill: #9198a1 }  .page { fill: #0d1117 }  .box { fill: #161b22; stroke: #6e7681 }
    .axis, .arrow { stroke: #9198a1 }  .tip { fill: #9198a1 }  .grid { stroke: #2a313c }  .mark { stroke: #6e7681 }
    .everything { stroke: #9198a1 }  .everything-box { fill: #9198a1 }  .cached { fill: #388bfd }
    .fresh { fill: #f0883e }  .auto { fill: #58a6ff }  .each { fill: #bb8009 }
  }
"""


def svg(width: int, height: int, title: str, description: str, parts: Iterable[str]) -> str:
    """Return a whole SVG document."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text{shown} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Draw a horizontal or vertical arrow."""
    if y1 == y2:
        back = -7 if x2 > x1 else 7
        tip = f"{x2},{y2} {x2 + back},{y2 - 4} {x2 + back},{y2 + 4}"
    else:
        back = -7 if y2 > y1 else 7
        tip = f"{x2},{y2} {x2 - 4},{y2 + back} {x2 + 4},{y2 + back}"
    return line(x1, y1, x2, y2, "arrow") + f'<polygon class="tip" points="{tip}"/>'


def box(x: float, y: float, width: float, height: float, heading: str, *words: str) -> str:
    middle = x + width / 2
    parts = [f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>']
    top = y + height / 2 - 8 * len(words) + 5
    parts.append(text(middle, top, heading, kind="bold", anchor="middle"))
    parts += [text(middle, top + 17 * (i + 1), each, kind="small", anchor="middle") for i, each in enumerate(words)]
    return "\n".join(parts)


def draw_overview() -> str:
    """Draw where Tersely stands."""
    parts = [
        box(20, 40, 150, 84, "Agent", "OpenAI, Anthropic or", "Gemini client"),
        box(300, 30, 180, 104, "Tersely", "recognise the session", "build a short context", "store the reply"),
        box(610, 40, 150, 84, "Model host", "with its prompt cache"),
        box(300, 196, 180, 62, "Postgres", "every message, byte for byte"),
        arrow(170, 66, 300, 66),
        text(235, 56, "whole history", kind="small", anchor="middle"),
        arrow(300, 102, 170, 102),
        text(235, 120, "reply", kind="small", anchor="middle"),
        arrow(480, 66, 610, 66),
        text(545, 56, "short context,", kind="small", anchor="middle"),
        text(545, 82, "stable prefix", kind="small", anchor="middle"),
        arrow(610, 102, 480, 102),
        text(545, 120, "reply", kind="small", anchor="middle"),
        arrow(372, 134, 372, 196),
        text(362, 170, "store", kind="small", anchor="end"),
        arrow(408, 196, 408, 134),
        text(418, 170, "load the tail", kind="small"),
    ]
    return svg(
        780,
        276,
        "Tersely between an agent and a model host",
        "The agent sends its whole history to Tersely. Tersely stores every message in Postgres and sends the model "
        "host a short context with a stable prefix. The reply goes back to the agent.",
        parts,
    )


def draw_packages() -> str:
    """Draw the packages in the order of the import contracts, with the packages of the service and the store."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    rows = {
        contract["containers"][0]: [[name.strip() for name in line.split("|")] for line in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers"
    }
    parts = []
    left, width, gap, y = 60, 700, 8, 20.0
    for line in rows["tersely"]:
        inner = [name for each in rows.get(f"tersely.{line[0]}", []) for name in each] if len(line) == 1 else []
        height = 42 if inner else 26
        step = (width + gap) / len(line)
        for number, name in enumerate(line):
            x = left + step * number
            middle = x + (step - gap) / 2
            parts.append(
                f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{step - gap:.1f}" height="{height}" rx="5"/>'
            )
            parts.append(text(middle, y + 17, name, kind="bold", anchor="middle"))
            if inner:
                parts.append(text(middle, y + 34, " · ".join(inner), kind="small", anchor="middle"))
        y += height + gap
    parts.append(arrow(30, 20, 30, y - gap))
    parts.append(text(20, 14, "imports", kind="small"))
    return svg(
        780,
        round(y + 8),
        "The packages of the code",
        "From top to bottom: " + "; ".join(", ".join(line) for line in rows["tersely"]) + ". Imports point down.",
        parts,
    )


def draw_epochs(measured: dict[str, Any]) -> str:
    """Draw the size of each request of one conversation, with its epochs."""
    calls = measured["calls"]
    left, top, width, height = 64, 56, 690, 260
    limit = 20_000 * (1 + max(call["client"] for call in calls) // 20_000)

    def place(tokens: float) -> float:
        return float(top + height - height * tokens / limit)

    step = width / len(calls)
    parts = [text(left, 24, "Tokens of each request in one coding session", kind="bold")]
    parts += [
        bar(left, 34, 10, 10, "everything-box"),
        text(left + 16, 43, "what the agent sent", kind="small"),
        bar(left + 150, 34, 10, 10, "cached"),
        text(left + 166, 43, "sent on, repeated from the request before (cached)", kind="small"),
        bar(left + 480, 34, 10, 10, "fresh"),
        text(left + 496, 43, "sent on, new to the cache", kind="small"),
    ]
    for tokens in range(0, limit + 1, 40_000):
        parts.append(line(left, place(tokens), left + width, place(tokens), "grid"))
        parts.append(text(left - 8, place(tokens) + 4, f"{tokens // 1000}k", kind="small", anchor="end"))
    for number, call in enumerate(calls):
        x = left + step * number
        if number and call["epoch"] != calls[number - 1]["epoch"]:
            parts.append(line(x, place(limit * 0.62), x, top + height, "mark"))
            parts.append(text(x, place(limit * 0.62) - 5, f"{call['epoch']}", kind="small", anchor="middle"))
        cached = min(call["cached"], call["sent"])
        parts.append(bar(x, place(cached), step * 0.85, place(0) - place(cached), "cached"))
        parts.append(bar(x, place(call["sent"]), step * 0.85, place(cached) - place(call["sent"]), "fresh"))
    points = " ".join(f"{left + step * (i + 0.4):.1f},{place(call['client']):.1f}" for i, call in enumerate(calls))
    parts.append(f'<polyline class="everything" points="{points}"/>')
    parts.append(line(left, top + height, left + width, top + height, "axis"))
    for number in range(20, len(calls) + 1, 20):
        parts.append(text(left + step * (number - 0.5), top + height + 16, f"{number}", kind="small", anchor="middle"))
    parts.append(text(left + width / 2, top + height + 34, "model calls", kind="small", anchor="middle"))
    parts.append(text(left, top + height + 34, "dashed: an epoch starts", kind="small"))
    epochs, sent, client = calls[-1]["epoch"], sum(c["sent"] for c in calls), sum(c["client"] for c in calls)
    return svg(
        780,
        364,
        "Epochs over the calls of one session",
        f"{len(calls)} calls in {epochs} epochs. The agent's own requests grow to {calls[-1]['client']:,} tokens; "
        f"what Tersely sends grows within an epoch and falls when the next one starts. In all {sent:,} tokens are sent "
        f"instead of {client:,}.",
        parts,
    )


def whole_price(each: dict[str, Any]) -> float:
    """Return a row's price with Tersely's instructions and tools, at cache prices of 1.25 and 0.1."""
    first = each["prices"][0]
    return float(first["price"] + first["own_instructions"])


def lost_and_ready(each: dict[str, Any]) -> list[str]:
    """Return a row's lost references and ready edits in words, as far as there are any calls of these kinds."""
    lost = f"{each['lost_pointing']} of {each['pointing_calls']} lost" if each["pointing_calls"] else ""
    ready = f"{each['edits_ready']} of {each['edits']} edits ready" if each.get("edits") else ""
    return [words for words in (lost, ready) if words]


def draw_savings(results: Sequence[dict[str, Any]]) -> str:
    """Draw each file's price of the input relative to sending everything, its lost references, and its ready edits."""
    found = {(each["file"], each["strategy"]): each for each in results}
    calls = {each["file"]: each["calls"] / each["conversations"] for each in results}
    files = sorted(calls, key=lambda file: calls[file])
    left, top, width, row = 250, 64, 480, 60
    scale = width / 1.9
    height = row * len(files)
    kinds = (
        ("slim, auto", "auto", "slim, epochs (auto)"),
        ("slim, auto, repeats", "cached", "the same, repeated text once"),
        ("slim, every_request", "each", "slim, rebuilt at every request"),
    )
    parts = [
        text(20, 24, "Price of the input with Tersely's instructions, relative to sending everything", kind="bold")
    ]
    for number, (_, kind, words) in enumerate(kinds):
        parts += [bar(20 + 200 * number, 36, 10, 10, kind), text(36 + 200 * number, 45, words, kind="small")]
    for tenth in (0, 5, 10, 15):
        x = left + scale * tenth / 10
        parts.append(line(x, top, x, top + height, "axis" if tenth in (0, 10) else "grid"))
        parts.append(text(x, top + height + 16, f"{tenth / 10:.1f}", kind="small", anchor="middle"))
    listed = []
    for number, file in enumerate(files):
        y = top + row * number + 6
        parts.append(text(left - 10, y + 18, file, anchor="end"))
        parts.append(text(left - 10, y + 34, f"{calls[file]:.0f} calls a conversation", kind="small", anchor="end"))
        for offset, (strategy, kind, words) in zip((0, 16, 32), kinds, strict=True):
            each = found.get((file, strategy))
            if each is None:
                continue
            value = whole_price(each)
            shown = ", ".join([f"{value:.3f}", *(lost_and_ready(each) if kind != "each" else [])])
            parts.append(bar(left, y + offset, scale * value, 13, kind))
            parts.append(text(left + scale * value + 6, y + offset + 11, shown, kind="small"))
            listed.append(f"{file}, {words}: {shown}")
    return svg(
        780, top + height + 34, "Price, lost references and ready edits by data set", f"{'; '.join(listed)}.", parts
    )


CURVES = ("first", "second", "third", "fourth")
READY_FROM = 0.5


def mark_curves(rows: Sequence[dict[str, Any]], file: str) -> dict[tuple[float, float], list[dict[str, Any]]]:
    """Return the measured rows of a file by cache prices, for each low mark the row of the least price."""
    curves: dict[tuple[float, float], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["file"] == file:
            best = curves.setdefault((row["write"], row["read"]), {})
            if row["low"] not in best or row["price"] < best[row["low"]]["price"]:
                best[row["low"]] = row
    return {prices: [best[low] for low in sorted(best)] for prices, best in curves.items()}


def draw_watermarks(rows: Sequence[dict[str, Any]]) -> str:
    """Draw price against ready edits by watermarks, for each file, one curve for each pair of cache prices."""
    parts = [text(20, 24, "Price and ready edits by the low watermark", kind="bold")]
    said = []
    for panel, file in enumerate(sorted({row["file"] for row in rows})):
        left, top, width, height = 64 + 370 * panel, 76, 290, 230
        curves = mark_curves(rows, file)
        most = max(row["price"] for curve in curves.values() for row in curve) * 1.1

        def x(price: float, left: float = left, most: float = most, width: float = width) -> float:
            return left + width * price / most

        def y(row: dict[str, Any], top: float = top, height: float = height) -> float:
            return float(top + height * (1 - (row["ready"] / row["edits"] - READY_FROM) / (1 - READY_FROM)))

        parts.append(text(left, 62, file, kind="bold"))
        for tenth in range(5, 11):
            at = top + height * (10 - tenth) / 5
            parts.append(line(left, at, left + width, at, "grid"))
            parts.append(text(left - 8, at + 4, f"{tenth / 10:.1f}", kind="small", anchor="end"))
        for number, (prices, curve) in enumerate(sorted(curves.items())):
            points = " ".join(f"{x(row['price']):.1f},{y(row):.1f}" for row in curve)
            parts.append(f'<polyline class="curve {CURVES[number]}" points="{points}"/>')
            for row in curve:
                words = f"{row['low'] // 1000}k"
                parts.append(text(x(row["price"]) + 4, y(row) + 4, words, kind="small"))
            said.append(
                f"{file}, write {prices[0]:g}, read {prices[1]:g}: "
                + ", ".join(f"{row['low']:,}: {row['price']:.3f}, {row['ready']} of {row['edits']}" for row in curve)
            )
        for share in (0, 0.5, 1):
            at = left + width * share
            parts.append(text(at, top + height + 18, f"{most * share:.2f}", kind="small", anchor="middle"))
        parts.append(text(left + width / 2, top + height + 36, "price", kind="small", anchor="middle"))
    for number, prices in enumerate(sorted({(row["write"], row["read"]) for row in rows})):
        at = 330 + 112 * number
        parts.append(line(at, 20, at + 18, 20, f"curve {CURVES[number]}"))
        parts.append(text(at + 22, 24, f"write {prices[0]:g}, read {prices[1]:g}", kind="small"))
    return svg(
        780,
        360,
        "Price and ready edits by watermarks",
        "Cheapest high watermark for each low one. " + "; ".join(said),
        parts,
    )


def watermark_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of watermarks: for each pair of cache prices and low mark, the cheapest high one of all files
    together.
    """
    files = sorted({row["file"] for row in rows})
    lines = [
        "| cache: write, read | high / low | " + " | ".join(f"{f}: price | ready | lost" for f in files) + " |",
        "|---|---|" + "---:|" * 3 * len(files),
    ]
    found = {(r["write"], r["read"], r["low"], r["high"], r["file"]): r for r in rows}
    sums: dict[tuple[float, float, int], dict[int, float]] = {}
    for (write, read, low, high, _), row in found.items():
        by_high = sums.setdefault((write, read, low), {})
        by_high[high] = by_high.get(high, 0.0) + row["price"]
    for (write, read, low), by_high in sorted(sums.items()):
        high = min(by_high, key=lambda each: by_high[each])
        chosen = [found[write, read, low, high, file] for file in files]
        cells = [
            f"{row['price']:.3f} | {row['ready']} of {row['edits']} | {row['lost']} of {row['pointing']}"
            for row in chosen
        ]
        lines.append(f"| {write:g}, {read:g} | {high:,} / {low:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary_table(results: Sequence[dict[str, Any]], policy: str) -> str:
    """Return the table of prices, shares of tokens and lost references under one policy."""
    found = {(each["file"], each["strategy"]): each for each in results}
    lines = [f"| file | {' | '.join(STRATEGIES)} |", "|---|" + "---:|" * len(STRATEGIES)]
    for file in sorted({file for file, _ in found}):
        cells = []
        for strategy in STRATEGIES:
            each = found[file, f"{strategy}, {policy}"]
            cell = f"{each['prices'][0]['price']:.3f}, {each['sent_tokens'] / each['client_tokens']:.2f}"
            if each["pointing_calls"]:
                cell += f", {100 * each['lost_pointing'] / each['pointing_calls']:.1f} %"
            cells.append(cell)
        lines.append(f"| {file} | {' | '.join(cells)} |")
    return "\n".join(lines)


def slim_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of the default, with and without references for repeated text: what everything costs, what is
    lost, and how many edits are ready.
    """
    found = {(each["file"], each["strategy"]): each for each in results}

    def cells(each: dict[str, Any] | None) -> list[str]:
        if each is None:
            return ["", "", ""]
        lost = f"{each['lost_pointing']} of {each['pointing_calls']}" if each["pointing_calls"] else "none refer"
        ready = f"{each['edits_ready']} of {each['edits']}" if each.get("edits") else "no edits"
        return [f"{whole_price(each):.3f}", lost, ready]

    columns = ("price", "lost references", "ready edits")
    names = [*columns, *(f"{name}, repeats" for name in columns)]
    lines = [f"| file | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for file in sorted({file for file, _ in found}):
        row = [file, *cells(found[file, "slim, auto"]), *cells(found.get((file, "slim, auto, repeats")))]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def whole_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table with every column."""

    def percent(share: float | None) -> str:
        return "none" if share is None else f"{100 * share:.1f} %"

    def lost(number: int, of: int) -> str:
        return f"{100 * number / of:.1f} % of {of}" if of else "none refer"

    def ready(each: dict[str, Any]) -> str:
        """Rows that were measured before the figure existed have none."""
        if "edits" not in each:
            return ""
        return f"{each['edits_ready'] / each['edits']:.3f} of {each['edits']}" if each["edits"] else "none"

    lines = [
        "| file | strategy | conversations | calls | tokens, client | tokens, sent | sent | repeated prefix "
        "| price 1.25/0.1 | price 1/0.5 | own instructions | lost references | lost, pointed at "
        "| edit readiness | epochs |",
        "|---|---|" + "---:|" * 13,
    ]
    for each in sorted(results, key=lambda each: each["file"]):
        own = " / ".join(f"+{price['own_instructions']:.3f}" for price in each["prices"])
        cells = [
            each["file"],
            each["strategy"],
            f"{each['conversations']}",
            f"{each['calls']:,}",
            f"{each['client_tokens']:,}",
            f"{each['sent_tokens']:,}",
            f"{each['sent_tokens'] / each['client_tokens']:.2f}",
            percent(each["prefix_share"]),
            *(f"{price['price']:.3f}" for price in each["prices"]),
            own if any(price["own_instructions"] for price in each["prices"]) else "0",
            lost(each["lost_references"], each["referring_calls"]),
            lost(each["lost_pointing"], each["pointing_calls"]),
            ready(each),
            f"{each['epochs']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: str, name: str, content: str) -> str:
    """Replace what stands between the marks of ``name``."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    filled, count = re.subn(pattern, lambda found: f"{found[1]}{content}\n{found[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the marks of {name} are not there once")
    return filled


def documents() -> dict[Path, str]:
    """Return every generated file with its content."""
    measured, results = json.loads(EPOCHS.read_text()), json.loads(RESULTS.read_text())
    page = REPLAY_PAGE.read_text(encoding="utf-8")
    marks = json.loads(WATERMARKS.read_text())
    page = fill(page, "marks", watermark_table(marks))
    page = fill(page, "auto", summary_table(results, "auto"))
    page = fill(page, "slim", slim_table(results))
    page = fill(page, "every_request", summary_table(results, "every_request"))
    page = fill(page, "results", whole_table(results))
    return {
        PICTURES / "overview.svg": draw_overview(),
        PICTURES / "packages.svg": draw_packages(),
        PICTURES / "epochs.svg": draw_epochs(measured),
        PICTURES / "savings.svg": draw_savings(results),
        PICTURES / "watermarks.svg": draw_watermarks(marks),
        REPLAY_PAGE: page,
        README: fill(README.read_text(encoding="utf-8"), "slim", slim_table(results)),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_epochs(transcripts: Path) -> dict[str, Any]:
    """Play the first conversation of a file through a service and return the sizes of its calls."""
    model = free_port()
    with tempfile.TemporaryDirectory(prefix="tersely-pictures-") as data:
        # Started as root, the embedded Postgres runs under another account, which must reach its directory.
        Path(data).chmod(0o711)
        environment = os.environ | {
            "TERSELY_DATA_DIR": f"{data}/service",
            "TERSELY_OPENAI_BASE_URL": f"http://127.0.0.1:{model}/v1",
        }
        service = subprocess.Popen(
            [COMMAND, "serve", "--port", "0"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert service.stdout is not None
            url = re.search(r"http://[\d.]+:\d+", service.stdout.readline())
            assert url is not None, "the service did not start"
            command = [COMMAND, "replay", str(transcripts), "--limit", "1", "--model", "gpt-4o", "--strategy", "slim"]
            subprocess.run([*command, "--proxy", url[0], "--upstream-port", str(model)], check=True)
            (session,) = httpx.get(f"{url[0]}/api/sessions", timeout=60).json()["items"]
            export = httpx.get(f"{url[0]}/api/sessions/{session['id']}/export", timeout=60).json()
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait(60)
    calls = [
        {
            "epoch": call["epoch"],
            "client": call["tokens_before"],
            "sent": call["tokens_after"],
            "cached": round(call["tokens_after"] * call["cached_tokens"] / call["input_tokens"]),
        }
        for call in export["tersely"]["calls"]
    ]
    return {"file": transcripts.stem, "strategy": "slim", "policy": "auto", "calls": calls}


def _order(row: dict[str, Any]) -> tuple[str, int, bool, str]:
    strategy, _, policy = row["strategy"].partition(", ")
    return row["file"], ("full", *STRATEGIES).index(strategy), policy == "every_request", policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=Path, help="a file of transcripts whose first conversation is played")
    parser.add_argument("--results", type=Path, nargs="+", help="outputs of `tersely replay --json`")
    given = parser.parse_args()
    if given.epochs:
        measured = measure_epochs(given.epochs)
        calls = ",\n".join(json.dumps(call) for call in measured.pop("calls"))
        EPOCHS.write_text(json.dumps(measured)[:-1] + f', "calls": [\n{calls}\n]}}\n', encoding="utf-8")
    if given.results:
        new = [each for file in given.results for each in json.loads(file.read_text(encoding="utf-8"))]
        measured_anew = {(each["file"], each["strategy"]) for each in new}
        old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
        rows = [each for each in old if (each["file"], each["strategy"]) not in measured_anew] + new
        rows.sort(key=_order)
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n", encoding="utf-8")
    for path, content in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
