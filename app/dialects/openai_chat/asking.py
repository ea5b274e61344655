"""Plain questions in OpenAI's chat format."""

from __future__ import annotations

import re

from app.dialects import raw_json
from app.dialects.asking import Asking, PlainReply, PlainRequest
from app.dialects.openai_chat.read import read_reply, read_usage
from app.domain.errors import InvalidRequest

# OpenAI's reasoning models refuse `max_tokens`; many compatible hosts know nothing else.
_COMPLETION_TOKENS = re.compile(r"(?:^|/)(?:o\d|gpt-5)")


def write_question(*, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
    """A chat completion without tools, not streamed."""
    limit = "max_completion_tokens" if _COMPLETION_TOKENS.search(model) else "max_tokens"
    body = {
        "model": model,
        "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": message}],
        limit: max_tokens,
    }
    return PlainRequest(path="/chat/completions", body=raw_json.dump(body))


def read_answer(body: bytes) -> PlainReply:
    """The first choice of a chat completion. Raises `ValueError` for anything else."""
    try:
        members = raw_json.split_object(body)
        choice = raw_json.split_object(raw_json.split_array(members["choices"])[0])
        said = read_reply(choice["message"])
    except (KeyError, IndexError, InvalidRequest) as error:
        raise ValueError("not a chat completion") from error
    finish = raw_json.load(choice.get("finish_reason", b"null"))
    usage = read_usage(members.get("usage", b"null"))
    return PlainReply(
        text=said.text,
        finish=finish if isinstance(finish, str) else "",
        has_calls=bool(said.calls),
        input_tokens=usage.input,
        output_tokens=usage.output,
    )


def authorize(key: str) -> list[tuple[str, str]]:
    """The header that carries a key."""
    return [("authorization", f"Bearer {key}")]


ASKING = Asking(write=write_question, read=read_answer, authorize=authorize)
