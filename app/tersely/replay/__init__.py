"""``tersely replay``: recorded conversations played through a running proxy, both sides, checked and measured."""

from tersely.replay.command import replay

__all__ = ["replay"]
