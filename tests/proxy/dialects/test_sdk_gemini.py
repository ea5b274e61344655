"""Google's own client against the service, and Code Assist's calls, which no public client makes."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import post, wire
from tests.support.rows import messages_by_number
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model, RawUpstream, http_head

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from google import genai
    from google.genai import errors, types

MODEL = "gemini-3-flash"
ADD = types.FunctionDeclaration(
    name="add", description="adds", parameters_json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}
)


@pytest.fixture
def client(service: Service) -> Iterator[genai.Client]:
    made = genai.Client(api_key="g-upstream", http_options=types.HttpOptions(base_url=service.url))
    yield made
    made.close()


def config(key: str, **more: Any) -> types.GenerateContentConfig:
    headers = {"X-Tersely-Session": key, "X-Script": key}
    return types.GenerateContentConfig(http_options=types.HttpOptions(headers=headers), **more)


async def test_sync_call_is_answered_and_stored(client: genai.Client, service: Service, model: Model, key: str) -> None:
    answer = client.models.generate_content(
        model=MODEL, contents="good morning", config=config(key, system_instruction="You are kind.")
    )

    assert answer.text is not None
    assert answer.text.startswith("I was sent")
    assert "terse" not in answer.text
    assert [each.role for each in await messages_by_number(service, key)] == ["system", "user", "assistant"]
    assert model.last.headers["x-goog-api-key"] == "g-upstream"
    assert model.last.path == f"/v1beta/models/{MODEL}:generateContent"
    parts = json.loads(model.last.body)["systemInstruction"]["parts"]
    assert parts[0] == {"text": "You are kind."}


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
async def test_async_stream(client: genai.Client, service: Service, model: Model, key: str) -> None:
    model.script(key, ScriptedReply(message={"content": "one two three<terse>counted</terse>"}, chunk_chars=3))

    stream = await client.aio.models.generate_content_stream(model=MODEL, contents="count", config=config(key))
    chunks = [chunk async for chunk in stream]

    assert "".join(chunk.text or "" for chunk in chunks) == "one two three"
    assert chunks[-1].candidates is not None
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata is not None
    stored = await messages_by_number(service, key)
    assert [(each.role, each.finish) for each in stored] == [("user", None), ("assistant", "STOP")]
    await client.aio.aclose()


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_over_several_turns(client: genai.Client, service: Service, key: str, streams: bool) -> None:
    contents: list[Any] = []
    for number in range(3):
        contents.append(types.UserContent(f'call add {{"a": {number}}}'))
        content = _ask(client, contents, key, streams)
        (call,) = [part.function_call for part in content.parts if part.function_call]
        assert (call.name, call.args) == ("add", {"a": number})
        response = types.FunctionResponse(id=call.id, name="add", response={"output": str(number)})
        contents += [content, types.Content(role="user", parts=[types.Part(function_response=response)])]
        content = _ask(client, contents, key, streams)
        assert f"The tool answered: {number}" in "".join(part.text or "" for part in content.parts)
        contents.append(content)

    stored = await messages_by_number(service, key)
    assert [each.role for each in stored] == ["user", "assistant", "tool", "assistant"] * 3
    assert [each.turn for each in stored] == [turn for turn in (1, 2, 3) for _ in range(4)]
    assert {each.status for each in stored} == {"live"}


def content_of(answer: types.GenerateContentResponse) -> types.Content:
    assert answer.candidates
    content = answer.candidates[0].content
    assert content is not None
    return content


def _ask(client: genai.Client, contents: list[Any], key: str, streams: bool) -> Any:
    options = config(
        key,
        tools=[types.Tool(function_declarations=[ADD])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    if not streams:
        return content_of(client.models.generate_content(model=MODEL, contents=contents, config=options))
    parts: list[types.Part] = []
    for chunk in client.models.generate_content_stream(model=MODEL, contents=contents, config=options):
        parts += content_of(chunk).parts or []
    return types.Content(role="model", parts=parts)


async def test_a_chat_of_the_client_is_one_session(client: genai.Client, service: Service, key: str) -> None:
    chat = client.chats.create(model=MODEL, config=config(key))
    for number in range(3):
        for _ in chat.send_message_stream(f"question {number} of {key}"):
            pass

    stored = await messages_by_number(service, key)
    assert [each.role for each in stored] == ["user", "assistant"] * 3
    assert {each.status for each in stored} == {"live"}


async def test_errors_come_back_as_they_are(client: genai.Client, model: Model, key: str) -> None:
    body = {"error": {"code": 429, "message": f"no: {key}", "status": "RESOURCE_EXHAUSTED"}}
    model.script(key, ScriptedReply(status=429, body=json.dumps(body).encode()))
    with pytest.raises(errors.ClientError) as caught:
        client.models.generate_content(model=MODEL, contents="hi", config=config(key))
    assert caught.value.code == 429
    assert caught.value.status == "RESOURCE_EXHAUSTED"


async def test_own_errors_have_googles_shape(client: genai.Client) -> None:
    headers = {"X-Tersely-Strategy": "none such"}
    options = types.GenerateContentConfig(http_options=types.HttpOptions(headers=headers))
    with pytest.raises(errors.ClientError) as caught:
        client.models.generate_content(model=MODEL, contents="hi", config=options)
    assert caught.value.status == "INVALID_ARGUMENT"


async def test_other_methods_pass(client: genai.Client, model: Model) -> None:
    assert [each.name for each in client.models.list()] == ["models/scripted"]
    with pytest.raises(errors.ClientError):
        client.models.count_tokens(model=MODEL, contents="hi")
    assert model.last.path == f"/v1beta/models/{MODEL}:countTokens"


async def test_models_under_the_stable_version(service: Service, model: Model) -> None:
    options = types.HttpOptions(base_url=service.url, api_version="v1")
    with genai.Client(api_key="g-upstream", http_options=options) as client:
        assert [each.name for each in client.models.list()] == ["models/scripted"]
    assert model.last.path.startswith("/v1/models")
    assert model.last.headers["x-goog-api-key"] == "g-upstream"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/files/f", "/v1/operations"])
@pytest.mark.parametrize("in_query", [True, False])
async def test_a_key_of_googles_is_for_google(
    store: Database, model: Model, raw: RawUpstream, path: str, in_query: bool
) -> None:
    raw.answer(http_head("application/json"), b'{"data":[]}')
    before = len(raw.requests)
    with serve(store, raw.url, gemini_base_url=model.url.removesuffix("/v1")) as running:
        async with wire(running) as line:
            target = f"{path}?pageSize=7&key=AIzaSecret" if in_query else f"{path}?pageSize=7"
            header = "" if in_query else "x-goog-api-key: AIzaSecret\r\n"
            await line.send(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n{header}connection: close\r\n\r\n".encode())
            got = await line.to_end()
        assert b"x-tersely-context: passthrough" in got
        assert model.last.path == f"{path}?pageSize=7"
        assert model.last.headers["x-goog-api-key"] == "AIzaSecret"
        assert len(raw.requests) == before

        for elsewhere in ("/v1/chat/completions", "/v1/responses/resp_1", "/v1/messages/count_tokens"):
            body = b'{"model":"m","messages":[]}'
            await post(running, body, path=f"{elsewhere}?key=AIzaSecret", x_goog_api_key="AIzaSecret")
    assert len(raw.requests) == before + 3
    for request in raw.requests[before:]:
        assert b"AIzaSecret" not in request.target.encode() + b"\n".join(request.lines)


@pytest.mark.parametrize("size", [0, 11, 9 * 1024 * 1024])
@pytest.mark.parametrize("through", [True, False])
async def test_files_go_up_in_pieces_and_come_back(
    client: genai.Client, service: Service, model: Model, size: int, through: bool
) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    # Told a base URL in the call itself, the client sends the pieces there; else straight to where the host says.
    options = types.HttpOptions(base_url=service.url) if through else None
    config = types.UploadFileConfig(mime_type="text/plain", http_options=options)
    made = client.files.upload(file=io.BytesIO(content[:size]), config=config)

    assert made.size_bytes == size
    pieces = [each for each in model.state.received if each.path.startswith("/upload/v1beta/files?upload_id=")]
    assert b"".join(each.body for each in pieces[-(size // (8 * 1024 * 1024) + 1) :]) == content[:size]
    assert (pieces[-1].headers.get("accept-encoding") == "identity") is through
    assert client.files.get(name=made.name or "").state == types.FileState.ACTIVE
    answer = await post(service, b"", method="GET", path=f"/download/v1beta/{made.name}:download?alt=media&key=mine")
    assert (answer.status, answer.body) == (200, content[:size])
    assert answer.context == "passthrough"
    assert model.last.path == f"/download/v1beta/{made.name}:download?alt=media"
    assert model.last.headers["x-goog-api-key"] == "mine"


async def test_upload_address_has_googles_form(service: Service, model: Model) -> None:
    start = {"X_Goog_Upload_Protocol": "resumable", "X_Goog_Upload_Command": "start"}
    answer = await post(service, b"{}", path="/upload/v1/files", X_Goog_Upload_Header_Content_Length="5", **start)

    assert answer.headers["x-goog-upload-status"] == "active"
    assert answer.headers["x-goog-upload-url"].startswith(f"{model.url.removesuffix('/v1')}/upload/v1/files?upload_id=")


async def test_an_upload_over_the_limit_is_refused_in_googles_shape(store: Database, model: Model) -> None:
    with serve(store, model.url, max_body=1024) as running:
        before = model.state.calls
        answer = await post(running, b"x" * 1025, path="/upload/v1beta/files?upload_id=u")
    assert (answer.status, answer.json["error"]["code"]) == (413, 413)
    assert model.state.calls == before


async def test_a_key_in_the_address_becomes_a_header(service: Service, model: Model, key: str) -> None:
    body = json.dumps({"contents": [{"role": "user", "parts": [{"text": f"hello {key}"}]}]}).encode()
    answer = await post(service, body, path=f"/v1beta/models/{MODEL}:streamGenerateContent?key=secret%2Bkey&alt=sse")

    assert answer.status == 200
    assert model.last.path == f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse"
    assert model.last.headers["x-goog-api-key"] == "secret+key"
    assert b"\n:" not in answer.body
    assert b"event:" not in answer.body


async def test_a_stream_as_an_array(service: Service, model: Model, key: str) -> None:
    model.script(key, ScriptedReply(message={"content": "one two three<terse>counted</terse>"}, chunk_chars=3))
    body = json.dumps({"contents": [{"role": "user", "parts": [{"text": f"hello {key}"}]}]}).encode()
    answer = await post(
        service, body, path=f"/v1beta/models/{MODEL}:streamGenerateContent", X_Script=key, X_Tersely_Session=key
    )

    parts = [each["candidates"][0]["content"]["parts"][0]["text"] for each in answer.json]
    assert "".join(parts) == "one two three"
    assert [each.finish for each in await messages_by_number(service, key)] == [None, "STOP"]


@pytest.mark.parametrize("streams", [False, True])
async def test_code_assist(service: Service, model: Model, key: str, streams: bool) -> None:
    model.script(key, ScriptedReply(message={"content": "wrapped<terse>in a response</terse>"}, chunk_chars=4))
    request = {"contents": [{"role": "user", "parts": [{"text": f"hello {key}"}]}]}
    body = json.dumps({"model": MODEL, "project": "p", "user_prompt_id": "u", "request": request}).encode()
    method = "streamGenerateContent?alt=sse" if streams else "generateContent"
    answer = await post(
        service,
        body,
        path=f"/v1internal:{method}",
        X_Script=key,
        X_Tersely_Session=key,
        X_Tersely_Epoch=FROM_THE_START,
        Authorization="Bearer oauth",
    )

    assert answer.status == 200
    events = [json.loads(line[6:]) for line in answer.body.split(b"\r\n") if line] if streams else [answer.json]
    texts = [each["response"]["candidates"][0]["content"]["parts"][0]["text"] for each in events]
    assert "".join(texts) == "wrapped"
    sent = json.loads(model.last.body)
    assert (sent["model"], sent["project"]) == (MODEL, "p")
    assert "systemInstruction" in sent["request"]
    assert model.last.headers["authorization"] == "Bearer oauth"
    assert [each.role for each in await messages_by_number(service, key)] == ["user", "assistant"]


async def test_code_assists_other_methods_pass(service: Service, model: Model) -> None:
    answer = await post(service, b'{"metadata":{}}', path="/v1internal:loadCodeAssist")
    assert answer.status == 404
    assert model.last.path == "/v1internal:loadCodeAssist"
    assert model.last.body == b'{"metadata":{}}'
