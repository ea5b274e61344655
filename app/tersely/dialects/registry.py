"""All dialects by name. A new dialect is a package and an entry here."""

from __future__ import annotations

from tersely.dialects.anthropic.completion import COMPLETION as ANTHROPIC_COMPLETION
from tersely.dialects.anthropic.dialect import ANTHROPIC
from tersely.dialects.anthropic.local_reply import write_reply as write_anthropic_reply
from tersely.dialects.completion import CompletionFormat
from tersely.dialects.dialect import Dialect
from tersely.dialects.gemini.completion import COMPLETION as GEMINI_COMPLETION
from tersely.dialects.gemini.dialect import GEMINI
from tersely.dialects.gemini.local_reply import write_reply as write_gemini_reply
from tersely.dialects.gemini_gca.dialect import GEMINI_GCA
from tersely.dialects.gemini_gca.local_reply import write_reply as write_gca_reply
from tersely.dialects.local_reply import ReplyWriter
from tersely.dialects.openai_chat.completion import COMPLETION as CHAT_COMPLETION
from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.dialects.openai_chat.local_reply import write_reply as write_chat_reply
from tersely.dialects.openai_responses.completion import COMPLETION as RESPONSES_COMPLETION
from tersely.dialects.openai_responses.dialect import OPENAI_RESPONSES
from tersely.dialects.openai_responses.local_reply import write_reply as write_responses_reply
from tersely.domain.messages import Dialect as DialectName

DIALECTS: dict[DialectName, Dialect] = {
    each.name: each for each in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GEMINI, GEMINI_GCA)
}

_BY_STORED_NAME: dict[str, Dialect] = dict(DIALECTS.items())


def dialect_named(name: str) -> Dialect:
    """Return a dialect by its stored name. Raises `KeyError`."""
    return _BY_STORED_NAME[name]


# Code Assist is missing: a request in its envelope needs the caller's project.
COMPLETIONS: dict[DialectName, CompletionFormat] = {
    OPENAI_CHAT.name: CHAT_COMPLETION,
    OPENAI_RESPONSES.name: RESPONSES_COMPLETION,
    ANTHROPIC.name: ANTHROPIC_COMPLETION,
    GEMINI.name: GEMINI_COMPLETION,
}

REPLY_WRITERS: dict[DialectName, ReplyWriter] = {
    OPENAI_CHAT.name: write_chat_reply,
    OPENAI_RESPONSES.name: write_responses_reply,
    ANTHROPIC.name: write_anthropic_reply,
    GEMINI.name: write_gemini_reply,
    GEMINI_GCA.name: write_gca_reply,
}
