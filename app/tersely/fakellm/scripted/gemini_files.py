"""Google's files, scripted: uploaded in chunks like its resumable uploads, and downloaded whole.

As at Google, the first answer names the address for the chunks, on its own host, and a chunk that does not follow the
previous one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from tersely.fakellm.scripted.replies import ReceivedRequest, dump

_COMMANDS = frozenset({"upload", "finalize", "upload, finalize", "query"})


@dataclass(slots=True)
class _File:
    kind: str
    size: int
    name: str
    content: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    def describe(self) -> dict[str, str]:
        state = "ACTIVE" if self.is_whole else "PROCESSING"
        return {"name": self.name, "mimeType": self.kind, "sizeBytes": str(self.size), "state": state}


class Files:
    """The files of a host."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def upload(self, received: ReceivedRequest, *, root: str, upload_id: str) -> web.Response:
        """Return the beginning of an upload (no ``upload_id``), or a piece of it. ``root``: scheme, host and port."""
        command = received.headers.get("X-Goog-Upload-Command", "")
        if not upload_id:
            if command != "start" or received.headers.get("X-Goog-Upload-Protocol") != "resumable":
                return _refuse(400, "Only resumable uploads are scripted.")
            return self._start(received, root)
        file = self._files.get(upload_id)
        if file is None:
            return _refuse(404, "No such upload.")
        if command not in _COMMANDS or received.headers.get("X-Goog-Upload-Offset") != str(len(file.content)):
            return _refuse(400, f"The next piece begins at {len(file.content)}.")
        file.content += received.body
        if "finalize" not in command:
            return web.Response(headers={"X-Goog-Upload-Status": "active"})
        if len(file.content) != file.size:
            return _refuse(400, f"{file.size} bytes were announced.")
        file.is_whole = True
        body = dump({"file": file.describe()})
        return web.Response(body=body, content_type="application/json", headers={"X-Goog-Upload-Status": "final"})

    def _start(self, received: ReceivedRequest, root: str) -> web.Response:
        upload_id = f"u{received.number}"
        self._files[upload_id] = _File(
            kind=received.headers.get("X-Goog-Upload-Header-Content-Type", ""),
            size=int(received.headers.get("X-Goog-Upload-Header-Content-Length", "0")),
            name=f"files/{upload_id}",
        )
        path = received.path.partition("?")[0]
        where = f"{root}{path}?upload_id={upload_id}&upload_protocol=resumable"
        return web.Response(headers={"X-Goog-Upload-URL": where, "X-Goog-Upload-Status": "active"})

    def find(self, name: str, *, is_download: bool) -> web.Response:
        """Return a file's description, or its content."""
        file = self._files.get(name)
        if file is None:
            return _refuse(404, f"files/{name} is not found.")
        if is_download:
            return web.Response(body=bytes(file.content), content_type=file.kind)
        return web.Response(body=dump(file.describe()), content_type="application/json")


def _refuse(status: int, message: str) -> web.Response:
    code = "NOT_FOUND" if status == 404 else "INVALID_ARGUMENT"
    body = dump({"error": {"code": status, "message": message, "status": code}})
    return web.Response(body=body, status=status, content_type="application/json")
