"""An admitted request: its reservation of the limits, and its turn among the tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol

import msgspec


class Reservation(Protocol):
    """The amounts that a request holds of one account."""

    def charge(self, tokens: float, money: float) -> None:
        """Count the use of a model call."""

    def close(self) -> None:
        """Return the unused part of the reservation."""


class Admission(msgspec.Struct):
    """One admitted request. ``leave`` ends its turn in the queue of calls in preparation."""

    reservations: Sequence[Reservation] = ()
    is_model_call: bool = False
    leave: Callable[[], None] | None = None
    is_closed: bool = msgspec.field(default=False)

    @property
    def is_charged(self) -> bool:
        """True if the use of a model call must be reported."""
        return self.is_model_call and bool(self.reservations)

    def charge(self, tokens: float, money: float) -> None:
        """Count the use of a model call, also after the end of the request."""
        for each in self.reservations:
            each.charge(tokens, money)

    def end_turn(self) -> None:
        """Let the next call be prepared."""
        if self.leave is not None:
            leave, self.leave = self.leave, None
            leave()

    def close(self) -> None:
        """End the request."""
        self.end_turn()
        if not self.is_closed:
            self.is_closed = True
            for each in self.reservations:
                each.close()


NOBODY = Admission()
# Set at the proxy's entry. Tasks that a request starts share it.
admission: ContextVar[Admission] = ContextVar("admission", default=NOBODY)


def charge(tokens: float, money: float | None) -> None:
    """Count the use of this request's model call, in tokens and USD; None: unknown."""
    admission.get().charge(tokens, money or 0.0)


def is_charged() -> bool:
    """Return whether limits apply to the model call of this request."""
    return admission.get().is_charged


def end_turn() -> None:
    """Report that this request is prepared and waits for its model host, so that the next one may be prepared."""
    admission.get().end_turn()
