"""Explain SQLite's errors in words that help a model to write a better query."""

from __future__ import annotations

import re
from typing import Any, Literal

from tersely.sandbox.child import COLUMNS, FUNCTIONS, SQL, VALUE, QueryLimits

TABLE = f"messages({', '.join(COLUMNS)})"
ONE_SELECT = f"only one SELECT can be run (or WITH ... SELECT), over the table {TABLE}"
TOO_LARGE = "the query needed more memory than it may have: select less at once (LIMIT, substr), join less"

_SPACE = re.compile(r"(?:[ \t\r\n\f]+|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]*")
_TABLE = re.compile(r"no such table: (.*)", re.DOTALL)
_COLUMN = re.compile(r"no such column: (.*)", re.DOTALL)
_FUNCTION = re.compile(r"no such function: (.*)", re.DOTALL)
_NEAR = re.compile(r'near "(.*)": syntax error', re.DOTALL)
_INTERRUPTED = "interrupted"
_OUT_OF_MEMORY = "out of memory"
_WORDS = {
    "incomplete input": "the SQL ends too early: something is missing at its end, or a parenthesis is not closed",
    "one statement at a time": f"there are several statements: {ONE_SELECT}",
    "number of bindings": "parameters (?, :name) cannot be used: write the values into the SQL",
    "string or blob too big": f"a value is longer than {VALUE} bytes: select less at once (LIMIT, substr)",
    _OUT_OF_MEMORY: TOO_LARGE,
}
# How much of the query an error repeats.
_ECHO = 60


def complaint(sql: str) -> str | None:
    """Return an error that can be seen before the query runs, or None."""
    if len(sql) > SQL:
        return f"the SQL has {len(sql)} characters, and the limit is {SQL}"
    if "\x00" in sql or any("\ud800" <= character <= "\udfff" for character in sql):
        return "the SQL contains U+0000 or half a surrogate pair"
    space = _SPACE.match(sql)
    start = space.end() if space else 0
    if start == len(sql):
        return f"the SQL is empty: {ONE_SELECT}"
    word = _WORD.match(sql, start)
    first = word[0].upper() if word else ""
    if first not in ("SELECT", "WITH", "VALUES"):
        return f"the SQL begins with {(first or sql[start])[:_ECHO]!r}: {ONE_SELECT}"
    return None


def too_long(seconds: float) -> str:
    """Return the words for a query that was stopped after so many seconds."""
    return (
        f"the query took more than {seconds:g} seconds and was stopped: narrow it down (WHERE id BETWEEN ... AND ..., "
        "fewer joins), or make it simpler"
    )


def kind_of(reply: dict[str, Any]) -> Literal["ok", "error", "too_long", "too_large"]:
    """Return the kind of a query's result."""
    message = str(reply.get("error", ""))
    if _INTERRUPTED in message:
        return "too_long"
    if _OUT_OF_MEMORY in message:
        return "too_large"
    return "error" if message else "ok"


def explain(reply: dict[str, Any], sql: str, limits: QueryLimits) -> str:
    """Return the words for a reply that is an error."""
    message = str(reply["error"])
    if kind_of(reply) == "too_long":
        return too_long(limits.seconds)
    if reply["denied"]:
        return _refusal(*reply["denied"])
    if found := _COLUMN.fullmatch(message):
        quoted = "; a text is written in single quotes" if f'"{found[1]}"' in sql else ""
        return f"there is no column {_name(found[1])}; the columns of messages are {', '.join(COLUMNS)}{quoted}"
    if found := _TABLE.fullmatch(message):
        return f"there is no table {_name(found[1])}; the only one is {TABLE}"
    if found := _FUNCTION.fullmatch(message):
        return _refusal("function", found[1])
    if found := _NEAR.fullmatch(message):
        return f'syntax error near "{_name(found[1])}"{_place(reply["at"], sql)}; the dialect is SQLite\'s'
    if message.startswith("unrecognized token"):
        return f"something is not closed or not allowed{_place(reply['at'], sql)}: {_name(message)}"
    return next((words for part, words in _WORDS.items() if part in message), message[:300])


def _refusal(kind: str, name: str) -> str:
    if kind == "function":
        return f"the function {_name(name)} is not available; there are {', '.join(sorted(FUNCTIONS - {'->', '->>'}))}"
    if kind == "table":
        return f"the table {_name(name)} cannot be read; the only one is {TABLE}"
    return f"this statement is not allowed: {ONE_SELECT}"


def _name(text: str) -> str:
    return text if len(text) <= _ECHO else text[:_ECHO] + "..."


def _place(at: int | None, sql: str) -> str:
    if at is None:
        return ""
    before = sql[:at]
    line = before.count("\n") + 1
    return f" at character {at + 1} (line {line}, column {at - (before.rfind(chr(10)) + 1) + 1})"
