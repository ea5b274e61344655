"""Load token vocabularies from the project's own files. Counting tokens needs no network.

bench/make_vocabulary.py makes the files and describes their format.
"""

from __future__ import annotations

import functools
import json
import zlib
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import tiktoken

EncodingName = Literal["o200k_base", "cl100k_base"]

_DATA = Path(__file__).resolve().parents[2] / "data"


@functools.cache
def load_encoding(name: EncodingName) -> tiktoken.Encoding:
    """Return the encoding ``name``. The first call for each takes some tenths of a second; later calls are cached."""
    content = zlib.decompress((_DATA / f"{name}.vocabulary").read_bytes())
    header, _, rest = content.partition(b"\n")
    definition = json.loads(header)
    return tiktoken.Encoding(
        name=definition["name"],
        pat_str=definition["pat_str"],
        special_tokens=definition["special_tokens"],
        mergeable_ranks=_ranks(rest, definition["tokens"]),
    )


def _ranks(content: bytes, count: int) -> dict[bytes, int]:
    tokens = content[count:]
    ends = accumulate(content[:count], initial=0)
    return {tokens[start:end]: rank for rank, (start, end) in enumerate(pairwise(ends))}
