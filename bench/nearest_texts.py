"""Rank texts by their embeddings: run by `bench.recall`, by the Python of an environment that has the model.

Reads from standard input ``[{"texts": [...], "queries": [...]}, ...]``, and writes for each element, and each of its
queries, the ``MOST`` nearest texts as ``[number, cosine]``, the nearest first. The model is the one that WordLlama's
wheel contains (static embeddings of 256 dimensions); nothing is downloaded.
"""

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
import wordllama

MOST: Final = 100


def main() -> None:
    model = wordllama.WordLlama.load(dim=256, cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    ranked = []
    for each in json.load(sys.stdin):
        texts, queries = (model.embed(each[name], norm=True).astype(np.float64) for name in ("texts", "queries"))
        cosines = np.round(queries @ texts.T, 6)
        orders = np.argsort(-cosines, axis=1, kind="stable")[:, :MOST]
        ranked.append([[(int(n), float(row[n])) for n in order] for row, order in zip(cosines, orders, strict=True)])
    json.dump(ranked, sys.stdout)


if __name__ == "__main__":
    main()
