"""The rows of turns, found without an index of all messages.

A message nearly always belongs to the session's newest turn when it is stored, so the turns of these rows never fall as
their sequence numbers rise, whatever becomes of the rows later. A binary search finds where a turn begins. The other
rows (a reply that came late, a message in front of known ones, one behind an undone turn) have ``newest_turn``, and an
index of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tersely.store.db.connection import Connection
from tersely.store.db.ranges import END

HERE = "tenant_id = $1 AND session_id = $2"
# The greatest number that a turn may have.
LAST_TURN = 2**31 - 1
# First and last turn, first and last sequence number: the parameters $3 to $6 of a statement with `of_turns`.
Span = tuple[int, int, int, int]

# The rows that were there before the column (0) come before all others and are in the index: they count as before any
# turn. Those that older code wrote since (-1) say nothing about their neighbours: they are passed over.
_BEGINNINGS = f"""
WITH RECURSIVE search AS (
    SELECT wanted.turn, 1::bigint AS low, s.last_seq + 1 AS high, s.last_seq
    FROM sessions s CROSS JOIN unnest($3::int[]) AS wanted (turn) WHERE s.tenant_id = $1 AND s.id = $2
    UNION ALL
    SELECT search.turn,
        CASE WHEN probe.newest < search.turn THEN probe.seq + 1 ELSE search.low END,
        CASE WHEN probe.newest < search.turn THEN search.high ELSE (search.low + search.high) / 2 END,
        search.last_seq
    FROM search LEFT JOIN LATERAL (
        SELECT seq, coalesce(newest_turn, turn) AS newest FROM messages
        WHERE {HERE} AND seq >= (search.low + search.high) / 2 AND seq < search.high
          AND newest_turn IS DISTINCT FROM -1
        ORDER BY seq LIMIT 1
    ) AS probe ON true
    WHERE search.low < search.high
)
SELECT turn, CASE WHEN low > last_seq THEN NULL ELSE low END AS seq FROM search WHERE low >= high
"""


def of_turns(columns: str, condition: str = "true") -> str:
    """Return a subquery for the rows of a `Span` that meet ``condition``, in any order."""
    return f"""(
    SELECT {columns} FROM messages
    WHERE {HERE} AND seq BETWEEN $5 AND $6 AND newest_turn IS NULL AND turn BETWEEN $3 AND $4 AND {condition}
    UNION ALL
    SELECT {columns} FROM messages
    WHERE {HERE} AND newest_turn IS NOT NULL AND turn BETWEEN $3 AND $4 AND {condition}
) AS of_turns"""


def of_each_turn(columns: str, condition: str = "true") -> str:
    """Return a subquery like `of_turns`, for the arrays of `spans` as $3 to $5."""
    return f"""unnest($3::int[], $4::bigint[], $5::bigint[]) AS span (of_turn, low, high) CROSS JOIN LATERAL (
    SELECT {columns} FROM messages
    WHERE {HERE} AND seq BETWEEN span.low AND span.high AND newest_turn IS NULL AND turn = span.of_turn
      AND {condition}
    UNION ALL
    SELECT {columns} FROM messages
    WHERE {HERE} AND newest_turn IS NOT NULL AND turn = span.of_turn AND {condition}
) AS of_turns"""


def noted_turn(turn: int, newest: int) -> int | None:
    """Return the ``newest_turn`` of a row; ``newest`` is the newest turn of the session, the row's own included."""
    return None if turn == newest else newest


def newest_turns(turns: Iterable[int], newest: int = 0) -> Iterator[int | None]:
    """Yield the ``newest_turn`` of each row, from the turns of the rows in order of their sequence numbers.

    ``newest`` is the newest turn of the session before them.
    """
    for turn in turns:
        newest = max(newest, turn)
        yield noted_turn(turn, newest)


async def span(connection: Connection, tenant: str, session_id: str, first: int, last: int) -> Span:
    """Return where the rows of the turns ``first`` to ``last`` are. Rows that are stored later may be of them, too."""
    if first > LAST_TURN:
        return LAST_TURN, 0, END, END  # no turn
    last = min(last, LAST_TURN)
    begins = await _beginnings(connection, tenant, session_id, [first, last + 1])
    return first, last, begins.get(first, END), begins.get(last + 1, END)


async def spans(
    connection: Connection, tenant: str, session_id: str, turns: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return the turns, and for each the first and the last sequence number between which its rows are."""
    begins = await _beginnings(connection, tenant, session_id, [*turns, *(turn + 1 for turn in turns)])
    return list(turns), [begins.get(turn, END) for turn in turns], [begins.get(turn + 1, END) for turn in turns]


async def _beginnings(connection: Connection, tenant: str, session_id: str, turns: Iterable[int]) -> dict[int, int]:
    """Turn -> the sequence number from which on its rows are, and before which those of earlier turns are; rows with
    ``newest_turn`` apart. A turn is missing if no row of it or of a later one is stored yet.
    """
    wanted = sorted({turn for turn in turns if turn <= LAST_TURN})
    records = await connection.fetch(_BEGINNINGS, tenant, session_id, wanted)
    return {record["turn"]: record["seq"] for record in records if record["seq"] is not None}
