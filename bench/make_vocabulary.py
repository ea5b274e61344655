"""Makes app/tersely/data/*.vocabulary: the token vocabularies, so that tokens are counted without fetching anything.

    npm pack tiktoken && tar xzf tiktoken-*.tgz
    make vocabulary ARGS=package/encoders

The npm package carries the ranks; names, patterns and special tokens come from the Python package, and so does the
proof: it knows the SHA-256 of the published file, and the ranks written here must spell that file byte for byte.

A vocabulary file is zlib-compressed: a line of JSON (name, pat_str, special_tokens, and in tokens how many there are),
one byte per token with its length, in order of rank from 0, then the tokens themselves.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiktoken_ext.openai_public

NAMES = ("o200k_base", "cl100k_base")
TARGET = Path(__file__).resolve().parents[1] / "app" / "tersely" / "data"


def tokens_of(source: Path) -> list[bytes]:
    """The tokens of an npm encoder file, by rank. Its lines read ``! FIRST_RANK TOKEN TOKEN ...``, in base64."""
    ranks: dict[int, bytes] = {}
    for line in json.loads(source.read_bytes())["bpe_ranks"].splitlines():
        mark, first, *words = line.split(" ")
        if mark != "!":
            raise SystemExit(f"{source}: a line that begins with {mark!r}")
        ranks.update(enumerate(map(base64.b64decode, words), start=int(first)))
    if sorted(ranks) != list(range(len(ranks))):
        raise SystemExit(f"{source}: ranks with gaps")
    return [ranks[rank] for rank in range(len(ranks))]


def definition_of(name: str) -> tuple[dict[str, Any], str]:
    """The Python package's definition of an encoding, without its ranks; and the SHA-256 of its published file."""
    seen: list[str] = []

    def note(_address: str, expected_hash: str) -> dict[bytes, int]:
        seen.append(expected_hash)
        return {}

    with patch.object(tiktoken_ext.openai_public, "load_tiktoken_bpe", note):
        definition = dict(tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]())
    del definition["mergeable_ranks"]
    return definition, seen[0]


def published_form(tokens: list[bytes]) -> bytes:
    """The text of the published file: a line of base64 and rank for each token."""
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def main(encoders: Path) -> None:
    """Write each vocabulary that proves right."""
    for name in NAMES:
        tokens = tokens_of(encoders / f"{name}.json")
        definition, expected = definition_of(name)
        if hashlib.sha256(published_form(tokens)).hexdigest() != expected:
            raise SystemExit(f"{name}: not the published vocabulary")
        header = json.dumps(definition | {"tokens": len(tokens)}, sort_keys=True).encode() + b"\n"
        content = zlib.compress(header + bytes(map(len, tokens)) + b"".join(tokens), 9)
        (TARGET / f"{name}.vocabulary").write_bytes(content)
        print(f"{name}: {len(tokens)} tokens, {len(content)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
