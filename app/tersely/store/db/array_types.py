"""Array types of Postgres that connections know without asking the server.

The driver knows the simple types. Before it encodes the first array of a kind it asks the server what that type is, on
each connection again, and inside whatever transaction is under way. That question is a query over all types: each takes
a node of a distributed Postgres .2 to .8 seconds of processor time, in which the transaction holds the lock of a
session. The numbers of built-in types are the same on every server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tersely.store.db.pool import Connection


class _Array(NamedTuple):
    """A built-in array type: its element's number and name."""

    element: int
    name: str


# By the number of the array type, from Postgres' pg_type.dat.
BUILT_IN: Mapping[int, _Array] = {
    1000: _Array(16, "bool"),
    1001: _Array(17, "bytea"),
    1005: _Array(21, "int2"),
    1007: _Array(23, "int4"),
    1009: _Array(25, "text"),
    1016: _Array(20, "int8"),
    1021: _Array(700, "float4"),
    1022: _Array(701, "float8"),
    1115: _Array(1114, "timestamp"),
    1182: _Array(1082, "date"),
    1185: _Array(1184, "timestamptz"),
    1563: _Array(1562, "varbit"),
    2951: _Array(2950, "uuid"),
}


class _NoStatement:
    """Stands for the driver's own statement, which was not prepared and so has replaced no other."""

    name = "none"


class TypedConnection(Connection):
    """A connection that asks the server about no built-in array type."""

    __slots__ = ()

    async def _introspect_types(self, typeoids: Iterable[int], timeout: float | None) -> Any:  # noqa: ASYNC109
        """Return what the driver would have asked for."""
        wanted = list(typeoids)
        if all(oid in BUILT_IN for oid in wanted):
            return [_description(oid) for oid in wanted], _NoStatement
        return await super()._introspect_types(wanted, timeout)  # type: ignore[misc]


def _description(oid: int) -> dict[str, object]:
    """Return a type in the columns of the driver's query."""
    array = BUILT_IN[oid]
    return {
        "oid": oid,
        "ns": "pg_catalog",
        "name": f"_{array.name}",
        "kind": "b",
        "basetype": None,
        "elemtype": array.element,
        "elemdelim": ",",
        "range_subtype": None,
        "attrtypoids": None,
        "attrnames": None,
        "depth": 0,
        "basetype_name": None,
        "elemtype_name": array.name,
        "range_subtype_name": None,
    }
