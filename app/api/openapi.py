"""The OpenAPI document, generated from the code."""

from __future__ import annotations

import json

from fastapi import FastAPI


def openapi_document(app: FastAPI) -> bytes:
    """The document as it is kept in the repository: stable order, readable, with a final newline."""
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False, sort_keys=False).encode() + b"\n"
