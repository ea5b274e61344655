"""Find the kinds of tags that the model sees in its own earlier replies and that its client does not see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tersely.dialects.registry import dialect_named
from tersely.domain.history.context import ContextMessage
from tersely.domain.history.history import (
    Entry,
    ShownReply,
)
from tersely.domain.text.tags import MARKERS, NOTHING, TagKinds


def kinds_shown(messages: Iterable[ContextMessage], *, known: TagKinds) -> TagKinds:
    """Return the kinds of tags in the context that were stripped from replies before the client saw them.

    A model repeats the tags that it sees in its own replies, even if the strategy no longer asks for them. A tag that
    the client was shown as text does not count: then the client's view of the reply has as many tags. Kinds in
    ``known`` are not searched for.
    """
    altered: dict[int, tuple[ShownReply, list[str]]] = {}
    for message in messages:
        if isinstance(message, Entry) and (view := message.client_view) is not None:
            altered.setdefault(id(view), (view, []))[1].append(message.message.text)
    shown = NOTHING
    if not altered:
        return shown
    for marker, kind in MARKERS:
        if kind | known != known and any(_has_more(texts, view, marker) for view, texts in altered.values()):
            shown |= kind
    return shown


def _has_more(texts: Sequence[str], view: ShownReply, marker: str) -> bool:
    count = sum(text.count(marker) for text in texts)
    if not count or not view.raw:
        return count > 0
    reply = dialect_named(view.dialect).read_reply(view.raw)
    return count > reply.text.count(marker)
