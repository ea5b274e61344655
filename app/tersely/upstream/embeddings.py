"""A host of an embedding model, spoken to in OpenAI's ``/v1/embeddings`` format."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tersely.domain.errors import UpstreamRefused, UpstreamUnavailable
from tersely.upstream.client import Timeouts, Upstream

MAX_REPLY = 64 * 1024 * 1024
# No host counts as many for one request.
MOST_TOKENS = 2**31
# Statuses that concern the host or our key, and not the request's content.
_NOT_NOW = frozenset({401, 403, 404, 408, 425, 429})


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _EmbeddingUsage(msgspec.Struct):
    total_tokens: Any = None


class _EmbeddingReply(msgspec.Struct):
    data: list[_Embedding]
    usage: _EmbeddingUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """Vectors, and the tokens that the host counted for them (None: it did not)."""

    vectors: list[array[float]]
    tokens: int | None


_reply_decoder = msgspec.json.Decoder(_EmbeddingReply)


class EmbeddingsHost:
    """Texts in, vectors out."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None, timeout: float) -> None:
        """``base_url`` is that of the API (``.../v1``); ``timeout`` in seconds, for a whole call's every wait."""
        self.model = model
        self._upstream = Upstream(base_url, Timeouts(connect=timeout, first_byte=timeout, idle=timeout))
        self._headers = [("Content-Type", "application/json"), ("Accept", "application/json")]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))

    async def open(self) -> None:
        """Get ready; connects to nobody yet."""
        await self._upstream.open()

    async def close(self) -> None:
        """Close every connection."""
        await self._upstream.close()

    async def embed(self, texts: Sequence[str]) -> EmbeddingResult:
        """Return one vector of 32-bit floats for each text, all of one length, and the tokens that the host counted.

        Raises `UpstreamRefused` if the host refuses these texts, `UpstreamUnavailable` for any other failure.
        """
        body = msgspec.json.encode({"model": self.model, "input": list(texts), "encoding_format": "float"})
        reply = await self._upstream.send("POST", "/embeddings", self._headers, body)
        try:
            reply.unpack(MAX_REPLY)
            content = await reply.read(MAX_REPLY)
        finally:
            reply.close()
        if 400 <= reply.status < 500 and reply.status not in _NOT_NOW:
            raise UpstreamRefused(f"the embedding model refused the texts: {reply.status}")
        if reply.status != 200:
            raise UpstreamUnavailable(f"the embedding model answered {reply.status}")
        return _read(content, len(texts))


def _read(content: bytes, count: int) -> EmbeddingResult:
    try:
        reply = _reply_decoder.decode(content)
        items = sorted(reply.data, key=lambda item: item.index)
        vectors = [array("f", item.embedding) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise UpstreamUnavailable("the embedding model's reply cannot be read") from error
    if [item.index for item in items] != list(range(count)) or len({len(vector) for vector in vectors}) > 1:
        raise UpstreamUnavailable("the embedding model's reply does not fit the texts")
    if not all(vectors):
        raise UpstreamUnavailable("the embedding model's reply holds an empty vector")
    tokens = reply.usage.total_tokens if reply.usage is not None else None
    return EmbeddingResult(vectors=vectors, tokens=tokens if type(tokens) is int and 0 < tokens < MOST_TOKENS else None)
