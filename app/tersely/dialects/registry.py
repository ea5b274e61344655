"""The dialects by name. A new one is a package, and an entry here."""

from __future__ import annotations

from tersely.dialects.anthropic import completion as anthropic_asking
from tersely.dialects.anthropic import local_reply as anthropic_saying
from tersely.dialects.anthropic.dialect import ANTHROPIC
from tersely.dialects.completion import CompletionFormat
from tersely.dialects.dialect import Dialect
from tersely.dialects.gemini import completion as gemini_asking
from tersely.dialects.gemini import local_reply as gemini_saying
from tersely.dialects.gemini.dialect import GEMINI
from tersely.dialects.gemini_gca import local_reply as gca_saying
from tersely.dialects.gemini_gca.dialect import GEMINI_GCA
from tersely.dialects.local_reply import ReplyWriter
from tersely.dialects.openai_chat import completion as asking
from tersely.dialects.openai_chat import local_reply as saying
from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.dialects.openai_responses import completion as responses_asking
from tersely.dialects.openai_responses import local_reply as responses_saying
from tersely.dialects.openai_responses.dialect import OPENAI_RESPONSES
from tersely.domain.messages import Dialect as DialectName

DIALECTS: dict[DialectName, Dialect] = {
    each.name: each for each in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GEMINI, GEMINI_GCA)
}

# A plain question in Code Assist's envelope would need the caller's project.
COMPLETIONS: dict[DialectName, CompletionFormat] = {
    OPENAI_CHAT.name: asking.COMPLETION,
    OPENAI_RESPONSES.name: responses_asking.COMPLETION,
    ANTHROPIC.name: anthropic_asking.COMPLETION,
    GEMINI.name: gemini_asking.COMPLETION,
}

REPLY_WRITERS: dict[DialectName, ReplyWriter] = {
    OPENAI_CHAT.name: saying.write_reply,
    OPENAI_RESPONSES.name: responses_saying.write_reply,
    ANTHROPIC.name: anthropic_saying.write_reply,
    GEMINI.name: gemini_saying.write_reply,
    GEMINI_GCA.name: gca_saying.write_reply,
}
