"""Recognise errors that report an input too large for the model, by a table of providers' texts.

One table serves all dialects, since gateways and compatible providers send any host's texts through any endpoint. A
false alarm costs a needless retry with a smaller context; a miss fails the user's request. So rate limits, quotas,
output limits and authorisation errors, which mention tokens and limits too, are excluded first.
"""

from __future__ import annotations

import re

from tersely.dialects.dialect import Overflow
from tersely.dialects.wire import raw_json

_FLAGS = re.IGNORECASE | re.DOTALL


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern in which ``#`` is a number. Groups: ``limit``, ``needed``, ``over`` (excess), ``extra`` (added
    to needed).
    """
    return re.compile(text.replace("#", r"\d[\d,]*"), _FLAGS)


NEVER_STATUSES = frozenset({401, 402, 403, 404, 405, 408, 409, 429, 503, 504, 529})
"""Authorisation, quota, rates, overload, time: whatever the text says, a smaller input is not the remedy."""

CODES = frozenset(
    {
        "context_length_exceeded",  # OpenAI, Groq, Cerebras
        "model_max_prompt_tokens_exceeded",  # GitHub Copilot
        "model_context_window_exceeded",  # Z.ai as message, Anthropic as stop_reason under status 200
        "exceed_context_size_error",  # llama.cpp
        "too_many_prompt_tokens",  # Perplexity
        "too_many_tokens",  # Cohere
        "request_too_large",  # Anthropic, 413: the body is over 32 MB
        "context_window_exceeded",
        "context_window_exceeded_error",
        "prompt_too_long",
        "input_too_long",
        "max_context_length_exceeded",
    }
)
"""Values of ``code``, ``type``, ``error_type``, ``stop_reason`` and ``reason`` that say it without a text."""

PATTERNS = tuple(
    map(
        _pattern,
        (
            # OpenAI: This model's maximum context length is 128000 tokens. However, your messages resulted
            # in 192041 tokens
            # vLLM: ... is 40960 tokens. However, you requested 100 output tokens and your prompt contains
            # at least 40861
            r"maximum context length is (?P<limit>#)(?: tokens)?.{0,40}requested (?P<extra>#) output tokens and your "
            r"prompt contains (?:at least )?(?P<needed>#)",
            # vLLM: 'max_tokens' ... is too large: 8000. This model's maximum context length is 4096 tokens
            # and your
            # request has 2778 input tokens (8000 > 4096 - 2778)
            r"too large: (?P<extra>#)\. This model's maximum context length is (?P<limit>#) tokens and your request has "
            r"(?P<needed>#)",
            # OpenRouter: This endpoint's maximum context length is 40960 tokens. However, you requested
            # about 42988 tokens
            r"maximum context length is (?P<limit>#)(?: tokens)?.{0,40}(?:requested|resulted in|has|contains)"
            r"(?: about| approximately| at least)? (?P<needed>#)",
            r"maximum context length is (?P<limit>#)",
            # xAI: This model's maximum prompt length is 131072 but the request contains 537812 tokens
            r"maximum (?:prompt|input|context|sequence)(?: token)? length (?:is|of) (?P<limit>#).{0,60}(?:contains|has|got|requested)"
            r" (?P<needed>#)",
            # OpenAI responses: Your input exceeds the context window of this model.
            r"exceeds? (?:the |this |that )?(?:model(?:'s)? |model's )?(?:maximum )?context (?:window|length|size|limit)",
            # llama.cpp: request (138229 tokens) exceeds the available context size (133376 tokens), try
            # increasing it
            r"request \((?P<needed>#) tokens\) exceeds the available context size \((?P<limit>#)",
            r"exceeds? the available context",
            # llama-cpp-python: Requested tokens (2285) exceed context window of 2048
            r"tokens \((?P<needed>#)\) exceed(?:s|ed)? (?:the )?context window of (?P<limit>#)",
            # LM Studio: The number of tokens to keep from the initial prompt is greater than the context
            # length (n_keep:
            # 4166>= n_ctx: 4096)
            r"greater than the context length(?: \(n_keep: (?P<needed>#) ?>= ?n_ctx: (?P<limit>#))?",
            # Ollama: prompt too long; exceeded max context length by 4096 tokens
            r"exceed(?:s|ed) (?:the )?max(?:imum)? context (?:length|window|size)(?: by (?P<over>#))?",
            # Anthropic, Bedrock: prompt is too long: 213462 tokens > 200000 maximum
            r"prompt (?:is )?too long(?::\s*(?P<needed>#)\s*tokens\s*>\s*(?P<limit>#))?",
            # Anthropic: input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000
            r"exceed context limit: (?P<needed>#) \+ (?P<extra>#) > (?P<limit>#)",
            r"exceeds? (?:the )?context limit",
            # Anthropic, 413: Request exceeds the maximum size. Gemini: Request payload size exceeds the
            # limit: 20971520 bytes.
            r"request (?:payload size )?exceeds the (?:maximum size|limit: # bytes)",
            # Bedrock: Input is too long for requested model.
            r"input (?:prompt )?is too long",
            # Bedrock: too many total text bytes
            r"too many total text bytes",
            # Bedrock: Malformed input request: too many input tokens. Bedrock: Input Tokens Exceeded: ...
            r"too many input tokens|input tokens exceeded",
            # Gemini: The input token count (2845475) exceeds the maximum number of tokens allowed (1048576).
            r"(?:input|prompt) token count(?: \((?P<needed>#)\))? exceeds the maximum number of tokens"
            r"(?: allowed)?(?: \(?(?P<limit>#))?",
            # GitHub Copilot: prompt token count of 13613 exceeds the limit of 12288
            r"(?:input|prompt) token count of (?P<needed>#) exceeds the limit of (?P<limit>#)",
            # Cohere: too many tokens: size limit exceeded by 25836 tokens. ... The limit for this model is
            # 288000 tokens.
            r"too many tokens: size limit exceeded(?: by (?P<over>#) tokens)?(?:.{0,80}limit for this model is (?P<limit>#))?",
            r"too many tokens: .{0,40}(?:limit|maximum|max)\D{0,20}(?P<limit>#)",
            # Perplexity: The total length of all messages is too long.
            r"total length of (?:all )?(?:the )?messages is too long",
            # Cerebras: Please reduce the length of the messages or completion. Current length is 13212
            # while limit is 8192
            r"reduce the length of (?:the |your )?(?:messages|prompt|input|either)"
            r"(?:.{0,40}current length is (?P<needed>#) while limit is (?P<limit>#))?",
            # Mistral: Prompt contains 300000 tokens and 0 draft tokens, too large for model with 131072
            # maximum context length
            r"prompt contains (?P<needed>#) tokens.{0,60}too large for model with (?P<limit>#)",
            # TGI, Together: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: 9000 `inputs` tokens
            # and 512
            # `max_new_tokens`
            r"`?inputs`? tokens \+ `?max_new_tokens`? must be <= (?P<limit>#)(?:\. Given: (?P<needed>#) .{0,20}and (?P<extra>#))?",
            # TGI: `inputs` must have less than 4096 tokens. Given: 5000
            r"`?inputs`? must have less than (?P<limit>#) tokens(?:\. Given: (?P<needed>#))?",
            # Together: The input (265330 tokens) is longer than the model's context length (262144 tokens).
            r"(?:input|prompt) \((?P<needed>#) tokens\) is longer than the model's context length \((?P<limit>#)",
            r"longer than (?:the |this )?(?:model(?:'s)? )?(?:maximum )?context",
            # Poolside: Input length 265330 exceeds the maximum allowed input length of 262144 tokens.
            # Fireworks, Baseten: Input length (265330) exceeds model's maximum context length (262144).
            # DeepInfra: Requested input length 90000 exceeds maximum input length 32768
            r"(?:input|prompt|sequence) length \(?(?P<needed>#)\)? (?:exceeds|is longer than|is greater than) (?:the )?(?:model's )?"
            r"(?:maximum|max)(?: allowed)? (?:input|context|prompt|sequence|model)?(?: token)? ?length (?:of )?\(?(?P<limit>#)",
            # SGLang: The input (5000 tokens) ... ; Requested token count exceeds the model's maximum
            # context length of 131072
            # tokens. You requested a total of 133000 tokens
            r"exceeds the model's maximum context length of (?P<limit>#)"
            r"(?: tokens\. You requested a total of (?P<needed>#))?",
            r"exceeds? (?:the |this )?(?:model(?:'s)? )?max(?:imum)? (?:context|input|prompt|sequence|model)(?: token)?s? "
            r"(?:length|window|size|limit)",
            # vLLM: The decoder prompt (length 5000) is longer than the maximum model length of 4096.
            r"prompt \((?:total )?length (?P<needed>#)\) is (?:longer|greater) than the maximum model length(?: of (?P<limit>#))?",
            # MiniMax: invalid params, context window exceeds limit (2013): the number is an error code
            r"context (?:window|length|size) exceed(?:s|ed)(?: (?:the )?(?:limit|maximum))?",
            # Moonshot: Your request exceeded model token limit: 262144 (requested: 425573)
            r"exceeded (?:the )?model token limit(?:: (?P<limit>#)(?: \(requested: (?P<needed>#))?)?",
            # DashScope: Range of input length should be [1, 202745]
            r"range of input length should be \[#, (?P<limit>#)\]",
            # ds4: Prompt has 300,000 tokens, but the configured context size is 131,072 tokens
            r"prompt has (?P<needed>#) tokens.{0,40}context size is (?P<limit>#)",
            # Cloudflare: The estimated number of input and maximum output tokens exceeded this model
            # context window limit (7968)
            r"exceeded this model(?:'s)? context window(?: limit)?(?: \((?P<limit>#))?",
            # vLLM: max_tokens must be at least 1, got -186: what is left for the answer after the input
            r"max_(?:completion_|new_)?tokens must be at least 1, got (?:-#|0)\b",
            # OpenAI: Invalid 'messages[1].content': string too long. Expected a string with maximum length
            # 1048576
            r"Invalid '(?:messages|input)\b[^']*': string too long",
            # LiteLLM: ContextWindowExceededError
            r"ContextWindowExceeded|ContextLengthExceeded|context_length_exceeded|model_context_window_exceeded",
            # Google, Replicate, AI21 and others in general words
            r"context (?:length|window|size|limit) (?:was |has been |is )?exceeded",
            r"(?:prompt|input|conversation|messages?|request)(?: \S+){0,3} (?:is|are|was) too (?:long|large) for (?:the|this) "
            r"(?:requested )?(?:model|context)",
            r"(?:input|prompt) (?:tokens?|length) (?:exceeds?|exceeded) (?:the )?(?:limit|maximum|context|model)"
            r"|(?:number of )?(?:input|prompt) tokens \(?(?P<needed>#)\)? (?:exceeds?|exceeded|is greater than|has exceeded) "
            r"(?:the )?(?:\S+ ){0,4}\(?(?P<limit>#)",
            r"(?:does not|doesn't|cannot|can't|won't|will not) fit (?:in|into|within) (?:the |this )?(?:model(?:'s)? )?context",
        ),
    )
)

NEVER = re.compile(
    "|".join(
        (
            # OpenAI, Groq: Request too large for gpt-4o ... on tokens per min (TPM): Limit 30000, Requested
            # 342389
            r"tokens per (?:min|day|hour|second)|\bTP[MD]\b|per[- ](?:minute|day)|this minute",
            # Anthropic: This request would exceed the rate limit for your organization of 20,000 input
            # tokens per minute
            r"rate[ _-]?limit|throttl|quota|try again later|(?:please|then) wait|retry shortly",
            # Bedrock 503: Too many tokens queued
            r"tokens queued|overloaded",
            # OpenAI: max_tokens is too large: 64000. This model supports at most 16384 completion tokens
            r"supports at most # completion tokens".replace("#", r"\d+"),
            # Anthropic: max_tokens: 128000 > 64000, which is the maximum allowed number of output tokens
            r"maximum allowed number of output tokens",
            # OpenAI 500: internal error computing maximum context length
            r"internal error",
        )
    ),
    _FLAGS,
)

_CODE_KEYS = ("code", "type", "error_type", "stop_reason", "reason")
_TEXT_KEYS = ("message", "error_message", "detail", "raw", "msg", "error", "title")
_MAX_BODY = 64 * 1024
_MAX_DEPTH = 12
_BODILESS = {400: "cerebras", 413: "cerebras"}
"""Cerebras answers an overflow with 400 or 413 and no body at all."""


def classify_error(status: int, body: bytes) -> Overflow | None:
    """Return the overflow that a response reports, or None for every other response.

    ``body`` is the response body as received, JSON or a stream of events. In a response of status 200 only error
    events, failed responses and stop reasons count, never the reply's text.
    """
    if status in NEVER_STATUSES:
        return None
    if not body.strip():
        return Overflow() if status in _BODILESS else None
    texts, codes, members = _collect(status, body)
    text = "\n".join(texts)
    if NEVER.search(text):
        return None
    matches = [match for pattern in PATTERNS if (match := pattern.search(text))]
    if matches:
        # If several match, the one with the most numbers is used.
        return _measure(max(matches, key=lambda match: len(_figures(match))), members)
    return Overflow(limit=members.get("n_ctx"), needed=members.get("n_prompt_tokens")) if codes & CODES else None


def _measure(match: re.Match[str], members: dict[str, int]) -> Overflow:
    found = _figures(match)
    limit = found.get("limit", members.get("n_ctx"))
    needed = found.get("needed", members.get("n_prompt_tokens"))
    if needed is not None:
        needed += found.get("extra", 0)
    elif limit is not None and "over" in found:
        needed = limit + found["over"]
    return Overflow(limit=limit, needed=needed)


def _figures(match: re.Match[str]) -> dict[str, int]:
    return {key: int(value.replace(",", "")) for key, value in match.groupdict().items() if value}


def _collect(status: int, body: bytes) -> tuple[list[str], set[str], dict[str, int]]:
    """Return the texts, codes and figures of every error in the body."""
    texts: list[str] = []
    codes: set[str] = set()
    numbers: dict[str, int] = {}
    documents = _documents(body[:_MAX_BODY])
    if not documents and status >= 400:
        plain = body[:_MAX_BODY].decode(errors="replace")
        # An HTML page comes from a gateway in front of the model, which knows nothing about contexts.
        return ([] if plain.lstrip().startswith("<") else [plain]), codes, numbers
    for document in documents:
        for each in _errors(document) if status < 400 else [document]:
            _gather(each, texts, codes, numbers, 0)
    return texts, codes, numbers


def _documents(body: bytes) -> list[object]:
    try:
        document = raw_json.load(body)
        return document if isinstance(document, list) else [document]
    except ValueError:
        pass
    documents: list[object] = []
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data[:1] in {b"{", b"["}:
            try:
                documents.append(raw_json.load(data))
            except ValueError:
                continue
    return documents


def _errors(document: object) -> list[object]:
    """Return the errors of a body under status 200. Other texts, which may speak about context windows, are ignored."""
    if not isinstance(document, dict):
        return []
    response = document.get("response")
    found = [each.get("error") for each in (document, response) if isinstance(each, dict)]
    if "error_message" in document or document.get("type") == "error":
        found.append(document)
    stops = [document.get("stop_reason")]
    if isinstance(delta := document.get("delta"), dict):
        stops.append(delta.get("stop_reason"))
    for choice in choices if isinstance(choices := document.get("choices"), list) else []:
        if isinstance(choice, dict):
            stops.append(choice.get("finish_reason"))
            found.append(choice.get("error"))
    found.extend({"code": stop} for stop in stops)
    return [{"message": each} if isinstance(each, str) else each for each in found if each]


def _gather(value: object, texts: list[str], codes: set[str], numbers: dict[str, int], depth: int) -> None:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        for item in value:
            _gather(item, texts, codes, numbers, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str):
                if key in _CODE_KEYS:
                    codes.add(item.lower())
                if key in _TEXT_KEYS:
                    _gather_text(item, texts, codes, numbers, depth + 1)
            elif isinstance(item, int) and not isinstance(item, bool):
                numbers[key] = item
            else:
                _gather(item, texts, codes, numbers, depth + 1)


def _gather_text(text: str, texts: list[str], codes: set[str], numbers: dict[str, int], depth: int) -> None:
    """Gateways put the provider's own error, as JSON text, into theirs."""
    if text.lower() in CODES:
        codes.add(text.lower())
    if text[:1] in "{[":
        try:
            _gather(raw_json.load(text.encode("utf-8", "surrogatepass")), texts, codes, numbers, depth)
            return
        except ValueError:
            pass
    texts.append(text)
