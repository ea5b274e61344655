"""Values that are remembered within a budget of bytes."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class SizeBoundedCache(Generic[V]):
    """Caches values of pure functions by their arguments, ``budget`` bytes in total as counted by the caller.

    There are two generations: a value that was used since the last change of generations survives the next one. Keys
    are contents, so nothing is ever invalidated. It is safe in any thread.
    """

    def __init__(self, budget: int) -> None:
        self._half = budget // 2
        self._young: dict[Hashable, V] = {}
        self._old: dict[Hashable, V] = {}
        self._size = 0
        self._changing = Lock()

    def get(self, key: Hashable, size: int) -> V | None:
        """Return the cached value of ``key``, or None. ``size`` is its share of the budget."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value, size)
        return value

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Remember a value, unless it is larger than a generation."""
        if size > self._half:
            return
        with self._changing:
            if self._size + size > self._half:
                self._old, self._young, self._size = self._young, {}, 0
            self._young[key] = value
            self._size += size
