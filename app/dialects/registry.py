"""The dialects by name. A new one is a package, and an entry here."""

from __future__ import annotations

from app.dialects.anthropic import asking as anthropic_asking
from app.dialects.anthropic import saying as anthropic_saying
from app.dialects.anthropic.dialect import ANTHROPIC
from app.dialects.asking import Asking
from app.dialects.dialect import Dialect
from app.dialects.gemini import asking as gemini_asking
from app.dialects.gemini import saying as gemini_saying
from app.dialects.gemini.dialect import GEMINI
from app.dialects.gemini_gca import saying as gca_saying
from app.dialects.gemini_gca.dialect import GEMINI_GCA
from app.dialects.openai_chat import asking, saying
from app.dialects.openai_chat.dialect import OPENAI_CHAT
from app.dialects.openai_responses import asking as responses_asking
from app.dialects.openai_responses import saying as responses_saying
from app.dialects.openai_responses.dialect import OPENAI_RESPONSES
from app.dialects.saying import ReplyWriter
from app.domain.messages import Dialect as DialectName

DIALECTS: dict[DialectName, Dialect] = {
    each.name: each for each in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GEMINI, GEMINI_GCA)
}

# A plain question in Code Assist's envelope would need the caller's project.
ASKING: dict[DialectName, Asking] = {
    OPENAI_CHAT.name: asking.ASKING,
    OPENAI_RESPONSES.name: responses_asking.ASKING,
    ANTHROPIC.name: anthropic_asking.ASKING,
    GEMINI.name: gemini_asking.ASKING,
}

SAYING: dict[DialectName, ReplyWriter] = {
    OPENAI_CHAT.name: saying.write_reply,
    OPENAI_RESPONSES.name: responses_saying.write_reply,
    ANTHROPIC.name: anthropic_saying.write_reply,
    GEMINI.name: gemini_saying.write_reply,
    GEMINI_GCA.name: gca_saying.write_reply,
}
