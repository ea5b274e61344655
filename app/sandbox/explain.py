"""What SQLite says about a query, in words that help a model to write a better one."""

from __future__ import annotations

import re
from typing import Any

from app.sandbox.child import COLUMNS, FUNCTIONS, SOFT_LIMIT, SQL, VALUE

TABLE = f"messages({', '.join(COLUMNS)})"
ONE_SELECT = f"only one SELECT can be run (or WITH ... SELECT), over the table {TABLE}"
TOO_LONG = (
    f"the query took more than {SOFT_LIMIT:g} seconds and was stopped: narrow it down (WHERE id BETWEEN ... AND ..., "
    "fewer joins), or make it simpler"
)
TOO_LARGE = "the query needed more memory than it may have: select less at once (LIMIT, substr), join less"

_SPACE = re.compile(r"(?:[ \t\r\n\f]+|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]*")
_TABLE = re.compile(r"no such table: (.*)", re.DOTALL)
_COLUMN = re.compile(r"no such column: (.*)", re.DOTALL)
_FUNCTION = re.compile(r"no such function: (.*)", re.DOTALL)
_NEAR = re.compile(r'near "(.*)": syntax error', re.DOTALL)
_WORDS = {
    "incomplete input": "the SQL ends too early: something is missing at its end, or a parenthesis is not closed",
    "interrupted": TOO_LONG,
    "one statement at a time": f"there are several statements: {ONE_SELECT}",
    "number of bindings": "parameters (?, :name) cannot be used: write the values into the SQL",
    "string or blob too big": f"a value came out longer than {VALUE} bytes: select less at once (LIMIT, substr)",
    "out of memory": TOO_LARGE,
}
# How much of the query an error repeats.
_ECHO = 60


def complaint(sql: str) -> str | None:
    """What is wrong with a query before it is run, if something is."""
    if len(sql) > SQL:
        return f"the SQL has {len(sql)} characters, and may have {SQL}"
    if "\x00" in sql or any("\ud800" <= character <= "\udfff" for character in sql):
        return "the SQL contains U+0000 or half a surrogate pair"
    space = _SPACE.match(sql)
    start = space.end() if space else 0
    if start == len(sql):
        return f"the SQL is empty: {ONE_SELECT}"
    word = _WORD.match(sql, start)
    first = word[0].upper() if word else ""
    if first not in ("SELECT", "WITH", "VALUES"):
        return f"this begins with {(first or sql[start])[:_ECHO]!r}: {ONE_SELECT}"
    return None


def explain(reply: dict[str, Any], sql: str) -> str:
    """The words for a reply that is an error."""
    message = str(reply["error"])
    if reply["denied"]:
        return _refusal(*reply["denied"])
    if found := _COLUMN.fullmatch(message):
        return f"there is no column {_name(found[1])}; the columns of messages are {', '.join(COLUMNS)}"
    if found := _TABLE.fullmatch(message):
        return f"there is no table {_name(found[1])}; the only one is {TABLE}"
    if found := _FUNCTION.fullmatch(message):
        return _refusal("function", found[1])
    if found := _NEAR.fullmatch(message):
        return f'syntax error near "{_name(found[1])}"{_place(reply["at"], sql)}; the dialect is SQLite\'s'
    if message.startswith("unrecognized token"):
        return f"something is not closed or not allowed{_place(reply['at'], sql)}: {_name(message)}"
    return next((words for part, words in _WORDS.items() if part in message), message[:300])


def _refusal(what: str, name: str) -> str:
    if what == "function":
        return f"the function {_name(name)} is not available; there are {', '.join(sorted(FUNCTIONS - {'->', '->>'}))}"
    if what == "table":
        return f"the table {_name(name)} cannot be read; the only one is {TABLE}"
    return f"that cannot be done here: {ONE_SELECT}"


def _name(text: str) -> str:
    return text if len(text) <= _ECHO else text[:_ECHO] + "..."


def _place(at: int | None, sql: str) -> str:
    if at is None:
        return ""
    before = sql[:at]
    line = before.count("\n") + 1
    return f" at character {at + 1} (line {line}, column {at - (before.rfind(chr(10)) + 1) + 1})"
