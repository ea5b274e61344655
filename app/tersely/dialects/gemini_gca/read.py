"""From Code Assist's format to the domain."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.dialects.dialect import Request
from tersely.dialects.gemini import read as gemini
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body
from tersely.domain.errors import InvalidRequest


def read_request(body: bytes) -> Request:
    """As Gemini's, with the model from the wrapping; the client's session is among the ``ids``.

    Raises ``InvalidRequest`` also for a ``request`` that is not an object.
    """
    members = split_body(body)
    inner = members.get("request", b"{}")
    try:
        session = raw_json.split_object(inner).get("session_id", b"null")
        model, session_id = raw_json.load(members.get("model", b'""')), raw_json.load(session)
    except ValueError as error:
        raise InvalidRequest("Invalid 'request': expected an object.", field="request") from error
    return replace(
        gemini.read_request(inner),
        model=model if isinstance(model, str) else "",
        ids={"session_id": session_id} if isinstance(session_id, str) else {},
    )
