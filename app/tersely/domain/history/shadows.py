"""Describe the figures of a shadow in a sentence."""

from __future__ import annotations


def describe_shadow(price: float | None, *, calls: int, missing: int, whole: str = "this session") -> str:
    """Return a sentence: the price relative to what was sent, and how many calls would have lacked something."""
    cost = "have cost an unknown amount" if price is None else f"have cost {price:.2f} of what it cost"
    used = f"{missing:,} of {calls:,} calls used something that would have been missing"
    return f"{whole} would {cost}, and {used}"
