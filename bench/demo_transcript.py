"""Write the console's built-in demo: a coding agent's session with the scripted model (``make demo-transcript``).

The agent's side and the repository are made up here; each reply comes from the scripted model, which is given them as
its script. The same code gives the same file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tersely.fakellm.scripted import ReceivedRequest, ScriptedModel, ScriptedReply
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.transcripts.conversations import TIME

OUTPUT = Path(__file__).parents[1] / "app" / "tersely" / "data" / "demo_transcript.json"
MODEL = "claude-sonnet-4-5"

SYSTEM = """You are a careful software engineer who works in the repository `orderflow`.

Orderflow imports orders from shops every night: it fetches CSV files from a bucket, parses them, checks each row,
looks up customers, and writes orders and a report to Postgres. Python 3.12, no framework, tests with pytest.

How you work:
- Read before you change. Say what you found before you say what you do.
- Make the smallest change that mends the cause. Never edit a test to make it pass.
- Run the tests of what you touched after each change, and all tests at the end of a task.
- Money is an integer number of cents. Times are UTC. Identifiers are never logged together with names.
- A row that cannot be read is counted and written to the rejects file with its reason. It never stops an import.
- Do not run anything against production. The staging copy is named in config/staging.toml.
- When you are done, say in at most five sentences what changed and why, and name the files.
"""


def _tool(name: str, text: str, **parameters: str) -> dict[str, Any]:
    members = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    return {
        "name": name,
        "description": text,
        "input_schema": {"type": "object", "properties": members, "required": list(parameters)},
    }


TOOLS = [
    _tool("read_file", "Read a file of the repository, with line numbers.", path="Path from the repository's root"),
    _tool("search", "Search all files for a regular expression.", pattern="A regular expression"),
    _tool("run", "Run a shell command in the repository and return its output.", command="The command line"),
    _tool("edit_file", "Replace a text that occurs once in a file.", path="Path", old="Text", new="Its replacement"),
]

ROWS = '''"""Rows of a shop's CSV file: read, checked, and turned into orders."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orderflow.customers import CustomerIndex
from orderflow.rejects import Rejects

COLUMNS = ("order_id", "customer_id", "placed_at", "currency", "total", "lines")


@dataclass(frozen=True, slots=True)
class Order:
    """An order. ``total`` in cents."""

    order_id: str
    customer_id: str | None
    placed_at: str
    currency: str
    total: int
    lines: int


def read_orders(path: Path, customers: CustomerIndex, rejects: Rejects) -> Iterator[Order]:
    """Yield the orders of a file; rows that cannot be read go to ``rejects``."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            if not row["customer_id"]:
                continue
            order_id = row["order_id"].strip()
            if not order_id:
                rejects.add(path, number, "no order id")
                continue
            try:
                total = parse_cents(row["total"])
            except ValueError:
                rejects.add(path, number, f"total {row['total']!r}")
                continue
            customer = customers.find(row["customer_id"].strip())
            yield Order(order_id, customer, row["placed_at"], row["currency"], total, int(row["lines"] or 0))


def parse_cents(text: str) -> int:
    """Read an amount of money. Raises `ValueError`."""
    whole, _, part = text.strip().replace(",", "").partition(".")
    if len(part) > 2:
        raise ValueError(text)
    return int(whole) * 100 + int(part.ljust(2, "0") or 0)
'''
CUSTOMERS = '''"""Customers by the ids that shops use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

GUEST = "guest"


class CustomerIndex:
    """Finds customers; ids of shops differ in case and in leading zeros."""

    def __init__(self, known: Mapping[str, str], aliases: Mapping[str, str]) -> None:
        self._known = {_folded(shop_id): own_id for shop_id, own_id in known.items()}
        self._aliases = {_folded(old): _folded(new) for old, new in aliases.items()}
        self.misses = 0

    def find(self, shop_id: str) -> str | None:
        """Return our id of a shop's customer; None for one that is not known yet."""
        folded = _folded(shop_id)
        found = self._known.get(self._aliases.get(folded, folded))
        if found is None:
            self.misses += 1
        return found

    def learn(self, pairs: Iterable[tuple[str, str]]) -> int:
        """Add customers; return how many were new."""
        before = len(self._known)
        self._known.update((_folded(shop_id), own_id) for shop_id, own_id in pairs)
        return len(self._known) - before


def _folded(shop_id: str) -> str:
    return shop_id.strip().lstrip("0").lower() or "0"
'''
RETRY = '''"""Try again when the bucket is away."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TRIES = 8
FIRST_PAUSE = 2.0
FACTOR = 3.0


def with_retries(work: Callable[[], T], *, is_transient: Callable[[Exception], bool]) -> T:
    """Return what ``work`` returns; after a transient error, wait and try again."""
    pause = FIRST_PAUSE
    for attempt in range(1, TRIES + 1):
        try:
            return work()
        except Exception as error:
            if attempt == TRIES or not is_transient(error):
                raise
        time.sleep(pause + random.uniform(0, pause))
        pause *= FACTOR
    raise AssertionError("unreachable")
'''
REPORT = '''"""The nightly report: what came in, what was written, what was refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from orderflow.rows import Order


@dataclass(slots=True)
class Report:
    """Counts of one night, by shop."""

    seen: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    cents: Counter[str] = field(default_factory=Counter)

    def add(self, shop: str, order: Order, *, is_written: bool) -> None:
        """Count an order."""
        self.seen[shop] += 1
        if is_written:
            self.written[shop] += 1
            self.cents[shop] += order.total

    def missing(self, shop: str) -> int:
        """Return how many orders were seen and neither written nor refused."""
        return self.seen[shop] - self.written[shop] - self.refused[shop]

    def lines(self) -> list[str]:
        """Return the report as text, a line for each shop."""
        return [
            f"{shop:<12} {self.seen[shop]:>7,} seen {self.written[shop]:>7,} written "
            f"{self.refused[shop]:>5,} refused {self.cents[shop] / 100:>14,.2f}"
            for shop in sorted(self.seen)
        ]
'''
TEST_ROWS = '''"""Rows are read, refused, or counted: none disappears."""

from __future__ import annotations

from pathlib import Path

import pytest

from orderflow.customers import CustomerIndex
from orderflow.rejects import Rejects
from orderflow.rows import parse_cents, read_orders

HEAD = "order_id,customer_id,placed_at,currency,total,lines\\n"


@pytest.fixture
def customers() -> CustomerIndex:
    return CustomerIndex({"0017": "c-17", "A9": "c-9"}, {"17b": "17"})


def test_order_is_read(tmp_path: Path, customers: CustomerIndex) -> None:
    path = tmp_path / "shop.csv"
    path.write_text(HEAD + "o-1,17,2026-03-02T08:11:00Z,EUR,19.90,2\\n")
    (order,) = read_orders(path, customers, Rejects(tmp_path))
    assert (order.customer_id, order.total) == ("c-17", 1990)


@pytest.mark.parametrize(("text", "cents"), [("19.90", 1990), ("1,204.5", 120450), ("7", 700)])
def test_amounts(text: str, cents: int) -> None:
    assert parse_cents(text) == cents


@pytest.mark.parametrize("text", ["", "12.345", "free"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cents(text)
'''
FILES = {
    "orderflow/rows.py": ROWS,
    "orderflow/customers.py": CUSTOMERS,
    "orderflow/retry.py": RETRY,
    "orderflow/report.py": REPORT,
    "tests/test_rows.py": TEST_ROWS,
}
SHOPS = ("alder", "birch", "cedar", "elm", "hazel", "linden", "maple", "rowan")


@dataclass(frozen=True, slots=True)
class ToolStep:
    """The agent's words before a tool call, the call, and the tool's output."""

    text: str
    tool: str
    given: dict[str, str]
    output: str


@dataclass(frozen=True, slots=True)
class Task:
    """The user's words, the steps, and the closing words."""

    question: str
    steps: tuple[ToolStep, ...]
    answer: str


def _read(path: str, text: str) -> ToolStep:
    lines = FILES[path].splitlines()
    return ToolStep(text, "read_file", {"path": path}, "\n".join(f"{n:4d}  {line}" for n, line in enumerate(lines, 1)))


def _run(command: str, text: str, output: str) -> ToolStep:
    return ToolStep(text, "run", {"command": command}, output)


def _edit(path: str, text: str, old: str, new: str) -> ToolStep:
    return ToolStep(text, "edit_file", {"path": path, "old": old, "new": new}, f"{path}: 1 replacement")


def _chance(*seed: object) -> int:
    return int.from_bytes(blake2b(repr(seed).encode(), digest_size=6).digest(), "big")


def _import_log(night: int, shops: tuple[str, ...] = SHOPS, *, lost: int = 0) -> str:
    lines = []
    for place, shop in enumerate(shops):
        size = 900 + _chance(shop, night) % 4200
        lines.append(
            f"02:{place:02d}:04 INFO  fetch    shop={shop} file=orders-2026-03-{night:02d}.csv bytes={size * 83}"
        )
        for batch in range(0, size, 700):
            at = f"02:{place:02d}:{5 + batch // 140:02d}"
            miss = _chance(shop, night, batch) % 9
            lines.append(
                f"{at} INFO  parse    shop={shop} rows={batch}-{min(size, batch + 699)} unknown_customers={miss} "
                f"ms={80 + _chance(batch, shop) % 140}"
            )
            if miss == 4:
                lines.append(f"{at} WARN  reject   shop={shop} row={batch + miss * 31} reason=\"total '12.345'\"")
        gone = lost if place == 2 else 0
        lines.append(f"02:{place:02d}:58 INFO  write    shop={shop} seen={size} written={size - gone} refused={0}")
    return "\n".join(lines)


def _pytest(passed: int, *failed: str) -> str:
    names = ("test_rows", "test_customers", "test_retry", "test_report", "test_rejects", "test_bucket", "test_cli")
    lines = ["============================= test session starts =============================="]
    lines.append("platform linux -- Python 3.12.9, pytest-8.4.2, pluggy-1.6.0")
    lines += [
        f"tests/{name}.py {'.' * (6 + _chance(name) % 30)} [{(place + 1) * 14:3d}%]" for place, name in enumerate(names)
    ]
    lines += [f"FAILED {each}" for each in failed]
    failures = f"{len(failed)} failed, " if failed else ""
    return "\n".join(
        [
            *lines,
            f"===================== {failures}{passed} passed in 3.{_chance(passed) % 90 + 10}s =====================",
        ]
    )


def _table(title: str, count: int) -> str:
    lines = [title, "order_id      | shop   | customer_id | placed_at            | total_cents | state"]
    lines.append("-" * 84)
    for n in range(count):
        shop = SHOPS[_chance(title, n) % len(SHOPS)]
        number = 480_000 + _chance(n, title) % 90_000
        lines.append(
            f"o-{number} | {shop:<6} | {'' if n % 7 == 3 else f'c-{number % 9973:05d}':<11} | "
            f"2026-03-{1 + n % 14:02d}T{n % 24:02d}:{number % 60:02d}:00Z | {number % 48_000:>11} | written"
        )
    return "\n".join([*lines, f"({count} rows)"])


def _grep(pattern: str, count: int) -> str:
    paths = [*FILES, "orderflow/bucket.py", "orderflow/rejects.py", "orderflow/cli.py", "orderflow/write.py"]
    return "\n".join(
        f"{paths[_chance(pattern, n) % len(paths)]}:{3 + _chance(n, pattern) % 190}: ... {pattern} ..."
        for n in range(count)
    )


def _audit(shop: str, night: int, *, question: str, cause: str, path: str, old: str, new: str, passed: int) -> Task:
    """Return the task that checks one shop: read its log and orders, find the fault, change the code, run the tests."""
    return Task(
        question,
        (
            _run(
                f"orderflow import --config config/staging.toml --shop {shop} --night 2026-03-{night:02d} --verbose",
                f"I import {shop} alone, with every line of the log.",
                _import_log(night, (shop, shop, shop)),
            ),
            _run(
                f"psql staging -c 'select * from orders where shop = {shop} order by placed_at desc limit 70'",
                "What it wrote.",
                _table(f"orders of {shop}", 70),
            ),
            _run(
                f"orderflow diff --shop {shop} --night 2026-03-{night:02d}",
                "And what differs.",
                _table(f"differs for {shop}", 24),
            ),
            ToolStep("Where does that come from?", "search", {"pattern": f"{shop}_"}, _grep(f"{shop}_", 14)),
            _edit(path, cause, old, new),
            _run(f"pytest -q -k {shop}", "The tests that concern it.", _pytest(passed)),
        ),
        f"{shop.capitalize()}: {cause} Changed in `{path}`; {passed} tests pass.",
    )


AUDITS = (
    _audit(
        "linden", 12, question="Linden was the slowest. Go through it by itself, and look at what it writes.",
        cause="It sends each order twice when its own export is retried, and both are looked up.",
        path="orderflow/write.py", old="    for order in orders:", new="    for order in unique(orders):", passed=23,
    ),
    _audit(
        "maple", 12, question="Now maple the same way: its totals do not match the shop's own invoice.",
        cause="Its totals have a comma for the decimals since 2 March.",
        path="orderflow/rows.py", old='.replace(",", "")', new=".replace(*DECIMALS[shop])", passed=27,
    ),
    _audit(
        "rowan", 13, question="Rowan next. They say that orders of the last hour of a day are missing.",
        cause="It writes local times without an offset, so that its last hour counts as the next day.",
        path="orderflow/times.py", old="tzinfo=UTC", new="tzinfo=ZONES[shop]", passed=31,
    ),
    _audit(
        "hazel", 13, question="And hazel: why are there so many unknown customers?",
        cause="Its ids have a check digit since the move to the new shop system.",
        path="orderflow/customers.py", old='.lstrip("0")', new='.lstrip("0").partition("-")[0]', passed=35,
    ),
    _audit(
        "elm", 14, question="Elm too, please. Its file has been twice as large since Tuesday.",
        cause="It sends the whole month each night; all but the last day is known already.",
        path="orderflow/bucket.py", old="    yield from rows", new="    yield from newer(rows, than=seen)", passed=38,
    ),
    _audit(
        "birch", 14, question="Last of all birch, then we have seen every shop that had a warning.",
        cause="Its header has a byte order mark in the middle of the file, where two exports were joined.",
        path="orderflow/rows.py", old="csv.DictReader(file)", new="csv.DictReader(without_marks(file))", passed=42,
    ),
)  # fmt: skip
PAUSE_BEFORE, PAUSE = 4, timedelta(minutes=47)
"""The user comes back to the session after a pause that no provider's cache outlives."""
BEGAN = datetime(2026, 3, 12, 9, 4, tzinfo=UTC)

TASKS = (
    Task(
        "The nightly import drops rows with an empty customer id. Find out why, and mend it.",
        (
            ToolStep(
                "I look for where customer ids are read.",
                "search",
                {"pattern": "customer_id"},
                _grep("customer_id", 24),
            ),
            _read("orderflow/rows.py", "Rows are read in rows.py."),
            _read("orderflow/customers.py", "And customers are looked up here."),
            _run(
                "tail -n 120 logs/import-2026-03-09.log", "What did last night's import say?", _import_log(9, lost=41)
            ),
            _edit(
                "orderflow/rows.py",
                "`read_orders` skips such rows before it has even read their order id: nobody counts them.",
                '            if not row["customer_id"]:\n                continue\n',
                "",
            ),
            _run("pytest -q", "Now the tests.", _pytest(131)),
        ),
        "Mended in `orderflow/rows.py`: `read_orders` skipped a row with an empty customer id before anything else, so "
        "it was neither written nor refused. Guest orders have no customer id, and are orders all the same. They are "
        "now written with `customer_id` null, as the column allows. All 131 tests pass.",
    ),
    Task(
        "The report of 9 March says 1,204 orders for cedar, but the table has 1,163. Are those the ones?",
        (
            _read("orderflow/report.py", "First how the report counts."),
            _run(
                "psql staging -c 'select * from orders where shop = cedar limit 90'",
                "Then the table.",
                _table("orders of cedar", 90),
            ),
            _run(
                "orderflow diff --shop cedar --night 2026-03-09",
                "The tool that compares both.",
                _table("only in the file", 41),
            ),
        ),
        "Yes: all 41 orders that are only in the file have an empty customer id. `Report.missing` would have shown "
        "them, but nothing calls it. With the change in `orderflow/rows.py` they come in with the next import.",
    ),
    Task(
        "Add a test for it, with a row like those that were lost. And let the report fail when `missing` is not 0.",
        (
            _read("tests/test_rows.py", "I look at the tests of rows."),
            _edit(
                "tests/test_rows.py",
                "A guest's order, as it was lost.",
                "def test_order_is_read(",
                "def test_order_of_a_guest_is_read(tmp_path: Path, customers: CustomerIndex) -> None:\n"
                '    path = tmp_path / "shop.csv"\n'
                '    path.write_text(HEAD + "o-482113,,2026-03-09T01:02:00Z,EUR,7.00,1\\n")\n'
                "    (order,) = read_orders(path, customers, Rejects(tmp_path))\n"
                "    assert order.customer_id is None\n\n\ndef test_order_is_read(",
            ),
            _run(
                "git stash && pytest -q tests/test_rows.py; git stash pop",
                "It must fail without the change.",
                _pytest(19, "tests/test_rows.py::test_order_of_a_guest_is_read"),
            ),
            _run("pytest -q tests/test_rows.py", "And pass with it.", _pytest(20)),
            ToolStep("Who ends an import?", "search", {"pattern": "Report\\("}, _grep("Report(", 11)),
            _edit(
                "orderflow/report.py",
                "The import ends with `lines()`, so that is where a loss has to show.",
                "    def lines(self) -> list[str]:",
                "    def check(self) -> None:\n"
                '        """Raise `RowsLost` where orders were neither written nor refused."""\n'
                "        lost = {shop: self.missing(shop) for shop in self.seen if self.missing(shop)}\n"
                "        if lost:\n            raise RowsLost(lost)\n\n    def lines(self) -> list[str]:",
            ),
            _run("pytest -q", "All tests.", _pytest(134)),
        ),
        "`tests/test_rows.py` has the row `o-482113` of a guest; it fails without the change and passes with it. "
        "`Report.check` in `orderflow/report.py` raises `RowsLost` with the shops and counts, and the import calls it "
        "before it writes the report. 134 tests pass.",
    ),
    Task(
        "Run the whole import against the staging copy and tell me how long each step takes.",
        (
            _run(
                "cat config/staging.toml",
                "Which database is it?",
                'bucket = "s3://orders-staging"\ndsn = "postgresql:///orderflow_staging"\nparallel = 4\n',
            ),
            _run("orderflow import --config config/staging.toml --night 2026-03-10", "The import.", _import_log(10)),
            _run(
                "orderflow import --config config/staging.toml --night 2026-03-11",
                "One more night, to compare.",
                _import_log(11),
            ),
            _run("orderflow profile --last 2", "And the profile of both.", _table("slowest writes", 60)),
        ),
        "Nothing is lost any more: seen equals written for all eight shops on both nights. Fetching takes 4 s, parsing "
        "31 s, writing 12 s; parsing is dominated by `CustomerIndex.find`, which folds the id of each row twice. "
        "The slowest shop is linden.",
    ),
    Task(
        "One more: the retry waits far too long when the bucket is away. Look at the back-off.",
        (
            _read("orderflow/retry.py", "The retry."),
            ToolStep("Who uses it?", "search", {"pattern": "with_retries"}, _grep("with_retries", 9)),
            _run(
                "grep -c transient logs/import-2026-03-0*.log",
                "How often does it happen?",
                "\n".join(f"logs/import-2026-03-0{n}.log:{_chance(n) % 5}" for n in range(1, 10)),
            ),
            _edit(
                "orderflow/retry.py",
                "Eight tries with a factor of three wait up to 109 minutes.",
                "FACTOR = 3.0",
                "FACTOR = 2.0\nLONGEST = 30.0",
            ),
            _edit(
                "orderflow/retry.py",
                "A pause has a bound now.",
                "        pause *= FACTOR",
                "        pause = min(LONGEST, pause * FACTOR)",
            ),
            _run("pytest -q tests/test_retry.py", "Its tests.", _pytest(12)),
        ),
        "Eight tries with a factor of 3 and full jitter added up to 109 minutes. With a factor of 2 and at most 30 s "
        "between two tries it is 4 minutes at most (`orderflow/retry.py`). The import's own deadline is 20 minutes, so "
        "it now gets to report the failure itself.",
    ),
    Task(
        "Parsing is slow because ids are folded twice, you said. Make it faster, and measure before and after.",
        (
            _run(
                "python -m bench.parse --rows 200000",
                "Before.",
                "\n".join(
                    f"run {n}: {30.1 + _chance(n) % 14 / 10:.1f} s  find {18 + _chance(n, 2) % 20 / 10:.1f} s"
                    for n in range(12)
                ),
            ),
            _read("orderflow/customers.py", "The index again."),
            _edit(
                "orderflow/customers.py",
                "Aliases can be resolved once, when the index is made.",
                "        folded = _folded(shop_id)\n        found = self._known.get(self._aliases.get(folded, folded))",
                "        found = self._known.get(_folded(shop_id))",
            ),
            _edit(
                "orderflow/customers.py",
                "So the aliases become entries of their own.",
                "        self._aliases = {_folded(old): _folded(new) for old, new in aliases.items()}\n",
                "        for old, new in aliases.items():\n"
                "            if (own_id := self._known.get(_folded(new))) is not None:\n"
                "                self._known[_folded(old)] = own_id\n",
            ),
            _run("pytest -q tests/test_customers.py", "Tests of customers.", _pytest(23)),
            _run(
                "python -m bench.parse --rows 200000",
                "After.",
                "\n".join(
                    f"run {n}: {17.2 + _chance(n, 3) % 9 / 10:.1f} s  find {5 + _chance(n, 4) % 9 / 10:.1f} s"
                    for n in range(12)
                ),
            ),
            _run(
                "orderflow import --config config/staging.toml --night 2026-03-12",
                "And a whole night.",
                _import_log(12),
            ),
        ),
        "Parsing 200,000 rows took 30.6 s and takes 17.6 s. `CustomerIndex` resolves aliases once when it is made "
        "(`orderflow/customers.py`); `find` folds an id once. A night on staging gives the same counts as before.",
    ),
    *AUDITS,
    Task(
        "What was the id of the guest's order in the test, and which shop had lost rows?",
        (
            _run(
                "git diff --stat",
                "I check what has changed so far.",
                " orderflow/customers.py | 9 ++++-----\n orderflow/report.py    | 7 +++++++\n"
                " orderflow/retry.py     | 5 +++--\n orderflow/rows.py      | 2 --\n"
                " tests/test_rows.py     | 8 ++++++++\n",
            ),
        ),
        "The test in `tests/test_rows.py` uses `o-482113`. Cedar had lost 41 rows on the night of 9 March.",
    ),
    Task(
        "Write the change log entry. Three sentences at most.",
        (
            _run(
                "head -40 CHANGELOG.md",
                "How are entries written?",
                "\n".join(
                    f"- 2026-02-{28 - n:02d}: change number {140 - n} of the import, with its reason and the files."
                    for n in range(36)
                ),
            ),
            _edit(
                "CHANGELOG.md",
                "The entry.",
                "# Changes\n",
                "# Changes\n\n- Orders of guests are imported; a report that lost rows fails. Retries wait 4 "
                "minutes at most. Parsing takes 42 % less time.\n",
            ),
            _run("pytest -q", "All tests, once more.", _pytest(134)),
        ),
        "Orders of guests are imported, and an import that loses rows fails. Retries wait at most 4 minutes. Parsing "
        "takes 42 % less time.",
    ),
)


def _script() -> Iterator[dict[str, Any]]:
    """Yield the replies of the model, in order."""
    number = 0
    for task in TASKS:
        for step in task.steps:
            number += 1
            call = {"type": "tool_use", "id": f"toolu_{number:04d}", "name": step.tool, "input": step.given}
            yield {"role": "assistant", "content": [{"type": "text", "text": step.text}, call]}
        yield {"role": "assistant", "content": [{"type": "text", "text": task.answer}]}


async def make() -> dict[str, Any]:
    """Return the conversation, each reply of it as the scripted model gave it."""
    replies = _script()
    model = ScriptedModel(script=lambda _: ScriptedReply(message=next(replies)))
    messages: list[dict[str, Any]] = []
    request = {"model": MODEL, "max_tokens": 4096, "system": SYSTEM, "tools": TOOLS, "messages": messages}

    async def ask() -> None:
        received = ReceivedRequest(
            number=len(messages), method="POST", path="/v1/messages", headers={}, body=b"", request=dict(request)
        )
        reply = await model.decide(received, ANTHROPIC)
        if reply.body is not None:
            raise ValueError(reply.body.decode())
        messages.append(dict(reply.message))

    for task in TASKS:
        messages.append({"role": "user", "content": task.question})
        for step in task.steps:
            await ask()
            call = messages[-1]["content"][1]["id"]
            result = {"type": "tool_result", "tool_use_id": call, "content": step.output}
            messages.append({"role": "user", "content": [result]})
        await ask()
    at, questions = BEGAN, 0
    for message in messages:
        is_task = isinstance(message["content"], str)
        questions += is_task
        at += PAUSE if is_task and questions == PAUSE_BEFORE else timedelta(seconds=4 + _chance(at.isoformat()) % 20)
        message[TIME] = at.isoformat()
    return {
        "id": "demo",
        "dialect": "anthropic",
        "model": MODEL,
        "system": SYSTEM,
        "tools": TOOLS,
        "messages": messages,
    }


def main() -> None:
    """Write the file."""
    OUTPUT.write_text(json.dumps(asyncio.run(make()), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
