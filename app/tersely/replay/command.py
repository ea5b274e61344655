"""``tersely replay``: its arguments and its output."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tersely.dialects.registry import DIALECTS
from tersely.replay.checks import CheckFailure
from tersely.replay.play import Variant
from tersely.replay.run import ReplayPlan, run_here, run_there
from tersely.replay.table import COLUMNS, ReplayResult, as_json, as_markdown, cells
from tersely.server.run import log_as_json
from tersely.settings import load_settings
from tersely.strategies.epochs.policies import parse_policy
from tersely.strategies.presets import parse_strategy
from tersely.transcripts.conversations import BadTranscript, Transcript
from tersely.transcripts.files import load_transcript

MODEL = "gpt-4.1"
WINDOW = 1_047_576
MAX_SHOWN = 50


def replay(  # noqa: PLR0913 one argument for each option
    files: Annotated[
        list[Path],
        typer.Argument(help="Transcripts (a conversation on each line), recorded requests, or agents' session files."),
    ],
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy's name or JSON; may be repeated.", show_default="full and slim"),
    ] = None,
    epoch: Annotated[
        list[str] | None,
        typer.Option(help="auto, every_request or JSON; may be repeated.", show_default="auto"),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of the final replies that get a terse tag or a state block.", min=0, max=1)
    ] = 0.7,
    limit: Annotated[int | None, typer.Option(help="Only the first conversations of each file.", min=1)] = None,
    dialect: Annotated[
        str | None,
        typer.Option(help="The wire format of lines that do not name one.", show_default="by their shape"),
    ] = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out lines that are not a conversation, and report them.")
    ] = False,
    model: Annotated[str, typer.Option(help="The model that is asked for; it decides how tokens are counted.")] = MODEL,
    window: Annotated[
        int, typer.Option(help="The upstream refuses requests that are longer (tokens as bytes / 4).", min=1)
    ] = WINDOW,
    parallel: Annotated[int, typer.Option(help="Conversations played at a time.", min=1, max=64)] = 4,
    proxy: Annotated[
        str | None,
        typer.Option(help="A running Tersely whose upstream is the one served here.", show_default="start one"),
    ] = None,
    upstream_port: Annotated[
        int, typer.Option(help="With --proxy: the port on which the upstream is served.", min=0, max=65535)
    ] = 0,
    key: Annotated[str | None, typer.Option(help="With --proxy: a Tersely key.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the table to this file, as Markdown.")] = None,
) -> None:
    """Play recorded conversations through the proxy, check the results and measure them.

    The replay plays both sides: a client that resends its whole history, and a strict upstream that answers with the
    recorded replies. The exit code is 1 if the client did not get the recorded conversation, the upstream refused a
    request, or the store does not hold everything verbatim.
    """
    variants = _variants(strategy or ["full", "slim"], epoch or ["auto"])
    transcripts = _load(files, limit, dialect, skips=skip)
    plan = ReplayPlan(
        transcripts=transcripts, variants=variants, share=share, model=model, window=window, parallel=parallel
    )
    settings = load_settings()
    log_as_json("warning")
    with _progress(transcripts, variants) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if proxy is None:
            results = run_here(runner, settings, plan, progress)
        else:
            results = runner.run(
                run_there(plan, progress, address=proxy.rstrip("/"), port=upstream_port, headers=_key_header(key))
            )
    _show(results, wants_json=as_json_, output=output)
    failures = [failure for result in results for failure in result.failures]
    _print_failures(failures)
    if failures:
        raise typer.Exit(1)


def _load(files: Sequence[Path], limit: int | None, dialect: str | None, *, skips: bool) -> list[Transcript]:
    """Read all files. Raises `BadTranscript` for the first invalid line, or reports it and continues."""
    known = next((name for name in DIALECTS if name == dialect), None)
    if dialect is not None and known is None:
        raise BadTranscript(f"no such dialect: {dialect!r}; there are {', '.join(DIALECTS)}")

    def warn(what: str) -> None:
        print(f"left out: {what}", file=sys.stderr)

    on_bad_line = warn if skips else None
    return [load_transcript(path, limit=limit, dialect=known, on_bad_line=on_bad_line) for path in files]


def _variants(strategies: Sequence[str], epochs: Sequence[str]) -> list[Variant]:
    """Return each strategy under each policy; ``full`` once. Raises `InvalidRequest` for unknown ones."""
    for strategy in strategies:
        parse_strategy(strategy)
    for epoch in epochs:
        parse_policy(epoch)
    all_of_them = [Variant(strategy=s, epoch=e) for s in strategies for e in epochs]
    return list({variant.name: variant for variant in reversed(all_of_them)}.values())[::-1]


def _key_header(key: str | None) -> Mapping[str, str]:
    return {"x-tersely-key": key} if key else {}


@contextmanager
def _progress(transcripts: Sequence[Transcript], variants: Sequence[Variant]) -> Iterator[Callable[[str], None]]:
    """A function to be called after each call, with what is being played; shown on a terminal only."""
    console = Console(stderr=True)
    calls = len(variants) * sum(len(each.steps) for transcript in transcripts for each in transcript.conversations)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=calls)
        yield lambda what: bar.update(task, advance=1, description=what)


def _show(results: Sequence[ReplayResult], *, wants_json: bool, output: Path | None) -> None:
    if output is not None:
        output.write_text(as_markdown(results), encoding="utf-8")
    if wants_json:
        print(json.dumps(as_json(results), indent=2))
    elif sys.stdout.isatty():
        table = Table(*COLUMNS)
        for result in results:
            table.add_row(*cells(result))
        Console().print(table)
    else:
        print(as_markdown(results), end="")


def _print_failures(failures: Sequence[CheckFailure]) -> None:
    for failure in failures[:MAX_SHOWN]:
        print(f"failed: {failure}", file=sys.stderr)
    if len(failures) > MAX_SHOWN:
        print(f"failed: and {len(failures) - MAX_SHOWN} more", file=sys.stderr)
