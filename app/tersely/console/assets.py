"""Files of the console that browsers load: styles, scripts, and the vendored libraries."""

from __future__ import annotations

import gzip
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tersely.console.pages import HEADERS

FOLDER = Path(__file__).parent / "static"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


@lru_cache(maxsize=64)
def _load(name: str) -> tuple[bytes, bytes, str, str] | None:
    """A file, the same compressed, its tag and its type."""
    path = (FOLDER / name).resolve()
    if FOLDER.resolve() not in path.parents or path.suffix not in TYPES or not path.is_file():
        return None
    body = path.read_bytes()
    return body, gzip.compress(body, 9, mtime=0), f'"{sha256(body).hexdigest()[:24]}"', TYPES[path.suffix]


async def serve_asset(request: Request) -> Response:
    """A file of the console."""
    name = request.path_params["name"]
    found = _load(name) if len(name) < 100 else None
    if found is None:
        return Response("Not found", status_code=404, headers=dict(HEADERS))
    body, packed, tag, media_type = found
    headers = {**HEADERS, "etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type=media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(body, media_type=media_type, headers=headers)
