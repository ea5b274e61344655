"""Request bodies are split into members, or refused with the name of the invalid one."""

import msgspec
import pytest

from tersely.dialects.wire.bodies import BodyDecoder, MessageDecoder, check_caller, session_ids, try_decode, verbatim
from tersely.dialects.wire.members import append_items, split_body
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Text, ToolCall


class Body(msgspec.Struct):
    messages: list[msgspec.Raw]
    model: str = ""
    tools: msgspec.Raw = msgspec.Raw(b"")


class Item(msgspec.Struct):
    text: str


def test_split_body_keeps_the_bytes_of_values() -> None:
    assert split_body(b'{ "a": [1,  2], "b": "\\u00e9" }') == {"a": b"[1,  2]", "b": b'"\\u00e9"'}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"[]", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b'{"a": "\xff"}', r"not valid UTF-8 \(byte 7\)"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
    ],
)
def test_split_body_names_the_reason_of_a_refusal(body: bytes, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        split_body(body)


def test_append_items_keeps_the_bytes_of_the_first_ones() -> None:
    assert append_items(b'[{"a":  1}]', [{"b": 2}]) == b'[{"a":  1},{"b":2}]'
    assert append_items(None, [1]) == append_items(b"null", [1]) == b"[1]"
    with pytest.raises(InvalidRequest):
        append_items(b'"tools"', [1])


def test_body_decoder_keeps_messages_verbatim() -> None:
    body = BodyDecoder(Body).decode(b'{"messages": [{"text":  "a"}], "model": "m"}')
    assert (bytes(body.messages[0]), body.model, verbatim(body.tools)) == (b'{"text":  "a"}', "m", b"")


@pytest.mark.parametrize(
    ("body", "field"),
    [(b"{}", "messages"), (b'{"messages": 5}', "messages"), (b'{"messages": [], "model": 5}', "model")],
)
def test_body_decoder_names_the_invalid_member(body: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        BodyDecoder(Body).decode(body)
    assert refusal.value.field == field


def test_body_decoder_reads_lone_surrogates_as_the_standard_library_does() -> None:
    body = BodyDecoder(Body).decode(b'{"messages": [{"text": "\\ud800"}]}')
    assert bytes(body.messages[0]) == b'{"text": "\\ud800"}'


@pytest.mark.parametrize("raw", [b"5", b"{}", b'{"text": 5}', b'{"text"'])
def test_message_decoder_refuses_unreadable_messages(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        MessageDecoder(Item).decode(raw)
    assert try_decode(msgspec.json.Decoder(Item), raw) is None


def test_only_the_model_calls_tools() -> None:
    call = ToolCall(id="1", name="f", arguments="{}")
    check_caller("assistant", [call])
    check_caller("user", [Text(text="words")])
    with pytest.raises(InvalidRequest) as refusal:
        check_caller("user", [call])
    assert refusal.value.field == "role"


def test_session_ids_are_read_from_members_and_metadata() -> None:
    assert session_ids({"session_id": "a", "metadata": {"session_id": "b", "conversation_id": "c"}}) == {
        "session_id": "a",
        "conversation_id": "c",
    }
    assert session_ids({"session_id": 5, "metadata": "x"}) == {}
