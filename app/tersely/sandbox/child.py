"""The program of the child process: one session's messages in SQLite, and the agent's SQL over them.

It runs by itself (``python -I -S child.py SECONDS MEMORY``, as in `QueryLimits`) and imports nothing but the standard
library. Before it reads anything it gives up whatever it can: files, sockets, processes, memory beyond a limit, root.
What is left is guarded once more inside SQLite: queries are read-only, only known functions and tables are open to
them, and everything has a size. The one thing that no limit here can stop is a single SQLite function that spins; the
parent kills the process then.

Frames, both ways: 4 bytes of length (big-endian), then JSON. Commands:

- ``{"add": [row, ...]}``: rows as in `ROW` (times in ISO 8601, UTC), with two more members: ``[[call id, tool], ...]``
  of the calls that the message makes, and the call ids that it answers. No reply.
- ``{"clear": true}``: no rows. No reply.
- ``{"mark": {"dropped": [id, ...], "removed": [id, ...]}}``: everything else is live; rows of turn 0 go. No reply.
- ``{"ready": true}`` -> ``{}``: all that came before is done.
- ``{"run": sql}`` -> ``{"columns": [...], "rows": [[...], ...], "more": bool, "cut": bool}`` or
  ``{"error": SQLite's words, "denied": [what, name] or null, "at": offset or null}``. ``more``: there were more rows,
  ``cut``: a cell was too long.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

MiB = 1024 * 1024
VALUE = 5 * MiB
# Of an answer: rows, and bytes of a cell, of all cells, of a column's name.
ROWS = 200
CELL = 64 * 1024
ANSWER = 256 * 1024
NAME = 200
SQL = 20_000

NOBODY = 65534
CLONE_NEWNET = 0x40000000
PR_SET_NO_NEW_PRIVS = 38

ROW = "id, turn, role, kind, status, content, tool_name, created_at, tokens"
COLUMNS = ROW.split(", ")
_TOOL_NAME = COLUMNS.index("tool_name")
_CREATED_AT = COLUMNS.index("created_at")
CREATE = """
CREATE TABLE messages (id INTEGER PRIMARY KEY, turn INTEGER NOT NULL, role TEXT NOT NULL, kind TEXT NOT NULL,
    status TEXT NOT NULL, content TEXT NOT NULL, tool_name TEXT, created_at TEXT NOT NULL, tokens INTEGER NOT NULL)
"""
INSERT = f"INSERT OR REPLACE INTO messages ({ROW}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608

LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * SQL + 64,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 50_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 9,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# So many instructions of SQLite's machine between two looks at the clock.
STEPS = 10_000

TABLES = frozenset({"messages", "json_each", "json_tree"})
# Without `printf`, `format`, `zeroblob` and `randomblob`: a short call of these can ask for gigabytes.
_FUNCTIONS = """
abs avg ceil ceiling char coalesce concat concat_ws count cume_dist current_date current_time current_timestamp date
datetime dense_rank exp first_value floor glob group_concat hex ifnull iif instr json json_array json_array_length
json_extract json_group_array json_group_object json_object json_quote json_type json_valid
julianday lag last_value lead length like likelihood likely ln log log10 log2 lower ltrim max min mod nth_value ntile
nullif octet_length percent_rank pow power quote random rank replace round row_number rtrim sign sqrt strftime
string_agg substr substring sum time timediff total trim trunc typeof unicode unixepoch unlikely upper -> ->>
"""


class QueryLimits(NamedTuple):
    """Limits of a query: ``seconds`` until it is interrupted, and ``memory``, the bytes that SQLite may use for the
    rows and the query.
    """

    seconds: float = 2.0
    memory: int = 256 * MiB

    @property
    def hard(self) -> float:
        """Seconds after which a query that cannot be interrupted is killed."""
        return self.seconds + 1

    @property
    def cpu(self) -> int:
        """CPU seconds after which the process ends by itself, if its parent is gone."""
        return int(self.hard) + 17

    @property
    def address_space(self) -> int:
        """Bytes for SQLite, for what is sent and answered, and for Python."""
        return 2 * self.memory + 128 * MiB


DEFAULT_LIMITS = QueryLimits()


def _listed(pragma: str) -> frozenset[str]:
    """Return the names in a list of this SQLite (a pragma), in lower case."""
    with closing(sqlite3.connect(":memory:")) as db:
        return frozenset(name.lower() for (name,) in db.execute(f"SELECT name FROM {pragma}"))  # noqa: S608


FUNCTIONS = _listed("pragma_function_list").intersection(_FUNCTIONS.split())
MODULES = _listed("pragma_module_list")

# The tokens of SQLite that may contain quotes; the last is "...".
_QUOTES = re.compile(
    r"""'(?:[^']|'')*'?|`(?:[^`]|``)*`?|\[[^\]]*+\]?|--[^\n]*+|/\*.*?(?:\*/|\Z)|"((?>(?:[^"]|"")*))\"""", re.DOTALL
)
_NEAR = re.compile(r'near "(.*)": syntax error|unrecognized token: "(.*)"', re.DOTALL)


def give_up(limits: QueryLimits) -> None:
    """Give up everything that the process does not need. The other limits cover what the system does not
    permit here.
    """
    os.chdir("/")
    os.closerange(3, min(1 << 20, os.sysconf("SC_OPEN_MAX")))  # nothing should be inherited
    if sys.platform == "linux":
        with suppress(OSError):  # where memory is short, this goes first
            descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(descriptor, b"1000")
            os.close(descriptor)
        kernel = ctypes.CDLL(None)
        kernel.unshare(CLONE_NEWNET)
        kernel.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() == 0:
        with suppress(PermissionError):  # a container's root may be none
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
    os.nice(5)
    bounds = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        # Standard input, output and error are open. No other file and no socket can be opened.
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_AS, limits.address_space),
    ]
    for limit, value in bounds:
        with suppress(ValueError, OSError):  # macOS has no limit of the address space
            resource.setrlimit(limit, (value, value))


def limit_cpu(seconds: int) -> None:
    """Let the process end by itself if it computes on after its parent is gone."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class MessageTable:
    """The messages, and the only way to query them."""

    def __init__(self, limits: QueryLimits) -> None:
        self._limits = limits
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._db.text_factory = lambda value: value.decode("utf-8", "replace")
        for pragma in ("temp_store=MEMORY", "trusted_schema=OFF", f"hard_heap_limit={limits.memory}"):
            self._db.execute(f"PRAGMA {pragma}").fetchall()
        self._db.execute(CREATE)
        self._db.execute("CREATE INDEX messages_turn ON messages (turn)")
        for function in ("json_each", "json_tree"):  # SQLite makes such a table at its first use
            self._db.execute(f"SELECT * FROM {function}('[]')").fetchall()  # noqa: S608
        for category, value in LIMITS.items():
            self._db.setlimit(category, value)
        self._tools: dict[str, str] = {}
        self._denied: list[str] | None = None
        self._deadline = math.inf
        self._db.set_progress_handler(lambda: time.monotonic() > self._deadline, STEPS)

    def add(self, rows: list[list[Any]]) -> None:
        """Add rows, in order: a result gets its tool's name from the call before it."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(INSERT, map(self._named, rows))

    def _named(self, row: list[Any]) -> list[Any]:
        *values, calls, answers = row
        # As SQLite's own functions write a time, so that the two compare.
        values[_CREATED_AT] = values[_CREATED_AT][:19].replace("T", " ")
        self._tools.update(calls)
        if answers:
            names = dict.fromkeys(self._tools[each] for each in answers if each in self._tools)
            values[_TOOL_NAME] = ", ".join(names)[:NAME] or None
        return values

    def clear(self) -> None:
        """Have no rows."""
        self._db.execute("DELETE FROM messages")
        self._tools.clear()

    def mark(self, dropped: list[int], removed: list[int]) -> None:
        """Mark messages as not live. Instructions (turn 0) are removed, to be added again."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM messages WHERE turn = 0")
            self._db.execute("UPDATE messages SET status = 'live' WHERE status <> 'live'")
            self._db.executemany("UPDATE messages SET status = 'dropped' WHERE id = ?", ((each,) for each in dropped))
            self._db.executemany("DELETE FROM messages WHERE id = ?", ((each,) for each in removed))

    def run(self, sql: str) -> dict[str, Any]:
        """Return the answer to a query."""
        sql = without_guesses(sql)
        self._db.execute("PRAGMA query_only=ON")
        self._denied = None
        self._deadline = time.monotonic() + self._limits.seconds
        self._db.set_authorizer(self._authorize)
        try:
            return _collect(self._db.execute(sql))
        except MemoryError:
            return {"error": "out of memory", "denied": None, "at": None}
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return {"error": str(error), "denied": self._denied, "at": self._place(sql, str(error))}
        finally:
            self._db.set_authorizer(None)
            self._deadline = math.inf
            self._db.execute("PRAGMA query_only=OFF")

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        """Decide about each operation of a statement, which SQLite asks before it runs the statement."""
        match action:
            case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_RECURSIVE:
                return sqlite3.SQLITE_OK
            case sqlite3.SQLITE_READ:
                kind, name, is_allowed = "table", first or "", _may_read(first or "", second or "")
            case sqlite3.SQLITE_FUNCTION:
                kind, name, is_allowed = "function", second or "", (second or "").lower() in FUNCTIONS
            case _:
                kind, name, is_allowed = "action", first or "", False
        if is_allowed:
            return sqlite3.SQLITE_OK
        self._denied = self._denied or [kind, name]
        return sqlite3.SQLITE_DENY

    def _place(self, sql: str, message: str) -> int | None:
        """Return the position of a syntax error: the end of the shortest beginning of the SQL with the same error."""
        near = _NEAR.match(message)
        if near is None:
            return None
        token = near[1] or near[2] or ""
        for found in re.finditer(re.escape(token), sql) if token else ():
            try:
                self._db.execute("EXPLAIN " + sql[: found.end()]).close()
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
                if str(error) == message:
                    return found.start()
        return None


def without_guesses(sql: str) -> str:
    """Return the SQL with every "name" as `name`.

    SQLite reads a "name" that is no column as a text, so a misspelt name would be returned as itself. To switch that
    off needs Python 3.12.
    """
    return _QUOTES.sub(lambda found: found[0] if found[1] is None else f"`{_unquoted(found[1])}`", sql)


def _unquoted(name: str) -> str:
    return name.replace('""', '"').replace("`", "``")


def _may_read(table: str, column: str) -> bool:
    """Return whether a table may be read. If no column is read (``count(*)``), SQLite reports the name in the query,
    which may be an alias.
    """
    name = table.lower()
    return name in TABLES or not (column or name in MODULES or name.startswith(("sqlite_", "pragma_")))


def _collect(cursor: sqlite3.Cursor) -> dict[str, Any]:
    names = [str(column[0])[:NAME] for column in cursor.description or ()]
    most = min(CELL, ANSWER // max(1, len(names)))
    rows: list[list[Any]] = []
    size = 0
    is_cut = has_more = False
    for record in cursor:
        cells = [_cell(value, most) for value in record]
        size += sum(len(value.encode()) if isinstance(value, str) else 8 for value, _ in cells)
        if len(rows) == ROWS or (rows and size > ANSWER):
            has_more = True
            break
        rows.append([value for value, _ in cells])
        is_cut = is_cut or any(cut for _, cut in cells)
    cursor.close()
    return {"columns": names, "rows": rows, "more": has_more, "cut": is_cut}


def _cell(value: Any, limit: int) -> tuple[Any, bool]:
    """Return a value for JSON in at most ``limit`` bytes, and whether it was shortened."""
    if isinstance(value, bytes):
        room = max(0, limit // 2 - 2)
        return f"x'{value[:room].hex()}'", len(value) > room
    if isinstance(value, str):
        encoded = value.encode()
        if len(encoded) > limit:
            return encoded[:limit].decode("utf-8", "ignore"), True
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity", False
    return value, False


def _commands(limits: QueryLimits) -> Iterator[dict[str, Any]]:
    source = sys.stdin.buffer
    while len(header := source.read(4)) == 4:
        (length,) = struct.unpack(">I", header)
        limit_cpu(limits.cpu)
        yield json.loads(source.read(length))


def _reply(value: dict[str, Any]) -> None:
    encoded = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    sys.stdout.buffer.write(struct.pack(">I", len(encoded)) + encoded)
    sys.stdout.buffer.flush()


def main() -> None:
    """Serve commands until there are no more."""
    json.dumps({"warm": [1.5, "é"]}, ensure_ascii=False).encode()
    limits = QueryLimits(float(sys.argv[1]), int(sys.argv[2]))
    give_up(limits)
    table = MessageTable(limits)
    for command in _commands(limits):
        match command:
            case {"add": rows}:
                table.add(rows)
            case {"clear": _}:
                table.clear()
            case {"mark": {"dropped": dropped, "removed": removed}}:
                table.mark(dropped, removed)
            case {"ready": _}:
                _reply({})
            case {"run": sql}:
                _reply(table.run(sql))
            case _:
                raise ValueError("not a command")


if __name__ == "__main__":
    main()
