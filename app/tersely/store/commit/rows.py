"""Insert the new rows of locked sessions, large tables in portions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from tersely.store.commit import large_values
from tersely.store.commit.apply import NewRows
from tersely.store.commit.records import SessionCounters, counters_of, figures_of
from tersely.store.commit.sizes import LARGE, PORTION, PORTION_BYTES
from tersely.store.db.connection import Connection
from tersely.store.db.statements import INSERTS, UPDATE_SESSION, Record, as_arrays


async def insert_rows(connection: Connection, tenant: str, rows: NewRows, states: Iterable[SessionCounters]) -> None:
    """Insert ``rows`` and store the counters of the locked sessions that were written to."""
    for table, sql in INSERTS.items():
        found: list[Record] = getattr(rows, table)
        if len(found) <= LARGE:
            portions, values = _split(table, found)
        else:
            portions, values = await asyncio.to_thread(_split, table, found)
        for portion in portions:
            await connection.fetch(sql, tenant, *portion)
        for value in values:
            await large_values.write(connection, tenant, value)
    for state in states:
        if state.touched is not None:
            await connection.execute(UPDATE_SESSION, tenant, state.id, *counters_of(state), *figures_of(state))


def _split(table: str, records: list[Record]) -> tuple[list[list[list[object]]], list[large_values.LargeValue]]:
    """Return the columns of each portion of a table's records, and the values that are sent apart."""
    values: list[large_values.LargeValue] = []
    if table == "messages":
        records, values = large_values.split_off(records)
    return [as_arrays(portion) for portion in portions(records)], values


def portions(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Split records so that no statement is long to encode; a record that is larger than a portion is one by itself."""
    portion: list[Record] = []
    size = 0
    for record in records:
        weight = sum(len(value) for value in record if isinstance(value, bytes | str))
        if portion and (len(portion) == PORTION or size + weight > PORTION_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(record)
        size += weight
    if portion:
        yield portion
