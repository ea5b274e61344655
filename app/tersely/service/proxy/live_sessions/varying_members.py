"""A member of the request that a client changes with each call, behind the messages: nothing here depends on it.

Codex describes each call in such a member, in an order of its own each time.
"""

from __future__ import annotations

import msgspec

from tersely.dialects.wire.array_member import find_member, read_more

# What makes an object of the part of a body that begins with the end of its history.
_OPENING = b'{"":['


class VaryingMember(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The text around the value of the member: in the suffix of the client's body, and in that of the body that went
    upstream (empty: the client's own did).
    """

    before: bytes
    after: bytes
    sent_before: bytes
    sent_after: bytes

    def value_in(self, body: bytes, end: int) -> bytes | None:
        """Return the value in a body whose messages go on at ``end``; None where it does not end like the others."""
        if not body.endswith(self.after):
            return None
        start = body.rfind(self.before, end)
        value = body[start + len(self.before) : len(body) - len(self.after)] if start >= 0 else b""
        # One value and no more: so what is in front of it are the messages.
        return value if value and read_more(b"," + value) == [value] else None

    def suffix(self, value: bytes) -> bytes:
        """Return the client's suffix with this value."""
        return self.before + value + self.after

    def sent_suffix(self, value: bytes) -> bytes:
        """Return the suffix for the upstream with this value."""
        return self.sent_before + value + self.sent_after if self.sent_before else b""


def find_varying(name: str, suffix: bytes, sent_suffix: bytes) -> VaryingMember | None:
    """Return the member ``name`` of the two suffixes, which begin with the end of the history; None if one lacks it."""
    found = _around(name, suffix) if name else None
    sent = _around(name, sent_suffix) if sent_suffix else (b"", b"")
    if found is None or sent is None:
        return None
    return VaryingMember(before=found[0], after=found[1], sent_before=sent[0], sent_after=sent[1])


def _around(name: str, suffix: bytes) -> tuple[bytes, bytes] | None:
    """Return what stands before and behind the value of a member at the top of the request."""
    place = find_member(_OPENING + suffix, name)
    if place is None:
        return None
    start, end = place[0] - len(_OPENING), place[1] - len(_OPENING)
    return suffix[:start], suffix[end:]
