"""`tersely replay`: a small messy transcript through the whole thing, and proof that its checks can fail."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tersely.dialects.wire import raw_json
from tersely.domain.history.context_use import Edits, identifiers
from tersely.domain.text.terse import strip_terse
from tersely.replay import model as model_side
from tersely.replay.checks import StoredClientMessage, check_prefix, check_stored, compare_reply, is_mended
from tersely.replay.edit_readiness import EditCounter
from tersely.replay.lost_references import PastIdentifiers
from tersely.replay.measure import Counter, ReplayTotals, RequestParts, common, measure, own_tokens
from tersely.replay.model import CLOSE, OPEN, RecordedRequest, with_tag
from tersely.replay.play import Variant
from tersely.replay.table import COLUMNS, ReplayResult, as_markdown
from tersely.transcripts.conversations import BadTranscript, RecordedCall, ReplyForm
from tersely.transcripts.files import load_transcript
from tersely.transcripts.wire_forms import steps_of
from tests.conftest import SHARED_DATA, TERSELY, Database
from tests.support.chat_messages import user
from tests.support.replays import play
from tests.support.services import FROM_THE_START

MESSY = Path(__file__).resolve().parents[1] / "data" / "messy_conversations.jsonl"
REAL = SHARED_DATA / "transcripts" / "claude_code_sessions.jsonl"
SMALL_EPOCHS = '{"high": 2500, "low": 1200}'


async def replay(database: Database, *arguments: str) -> tuple[int, str, str]:
    """The command as a user runs it: exit code, output, errors."""
    process = await asyncio.create_subprocess_exec(
        TERSELY,
        *("replay", *arguments),
        env={**os.environ, "DATABASE_URL": database.dsn, "TERSELY_DATABASE_TIMEOUT": "20"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


async def test_a_messy_transcript_comes_through_and_is_measured(database: Database, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    strategies = ("--strategy", "full", "--strategy", "slim")
    epochs = ("--epoch", SMALL_EPOCHS, "--epoch", "every_request")
    code, out, errors = await replay(
        database, str(MESSY), *strategies, *epochs, "--share", "1", "--json", "--output", str(table)
    )
    assert (code, errors) == (0, "")
    results = {result["strategy"]: result for result in json.loads(out)}
    assert list(results) == ["full", f"slim, {SMALL_EPOCHS}", "slim, every_request"]
    full, slim, always = results.values()
    assert all((r["conversations"], r["calls"], r["failures"]) == (3, 16, []) for r in results.values())
    assert full["prices"][0]["price"] < 1.01  # a result that came late moves to its call
    assert full["prices"][0]["own_instructions"] == 0.0
    assert slim["sent_tokens"] < 0.6 * full["sent_tokens"]
    assert slim["prices"][0]["own_instructions"] > 0.0
    assert full["epochs"] < slim["epochs"] < always["epochs"]
    assert full["referring_calls"] > 0
    assert full["lost_references"] == 0
    assert table.read_text().count("\n") == 2 + len(results)


async def test_conversations_that_begin_alike_are_told_apart(database: Database, tmp_path: Path) -> None:
    """They may be at the same point at the same time: then nothing says which of two a second question continues."""
    beginning = [user("fix the parser"), {"role": "assistant", "content": "Which file?"}]
    lines = [
        {
            "id": f"alike-{n}",
            "messages": [*beginning, user(f"file{n}.py"), {"role": "assistant", "content": f"done {n}"}],
        }
        for n in range(8)
    ]
    alike = tmp_path / "alike.jsonl"
    alike.write_text("\n".join(json.dumps(line) for line in lines))
    code, out, errors = await replay(database, str(alike), "--strategy", "slim", "--parallel", "8", "--json")
    (result,) = json.loads(out)
    assert (code, errors, result["conversations"], result["calls"], result["failures"]) == (0, "", 8, 16, [])


async def test_a_replay_removes_its_sessions(database: Database) -> None:
    await play(database, [MESSY], Variant(strategy="slim", epoch="auto"))
    import asyncpg

    connection = await asyncpg.connect(database.admin_dsn)
    try:
        for table in ("tenants", "keys", "sessions", "messages", "terse", "epochs", "calls"):
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0, table
    finally:
        await connection.close()


async def test_altered_reply_is_reported(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(text: str, seed: tuple[object, ...], share: float) -> str:
        del seed, share
        return text.replace("Done:", "Done, ")

    monkeypatch.setattr(model_side, "with_tag", altered)
    (result,) = await play(database, [MESSY], Variant(strategy="slim", epoch=FROM_THE_START))
    failures = [str(failure) for failure in result.failures]
    # The client goes on with what it should have got, and that is then what the store holds.
    assert len(failures) == 1
    assert "greenhouse (line 1), message 15: content differs at character 4" in failures[0]


async def test_refused_request_is_reported(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tersely.replay.run.RecordedModel", lambda window: model_side.RecordedModel(window=40))
    (result,) = await play(database, [MESSY], Variant(strategy="full", epoch="auto"))
    assert any("the upstream refused it: \"This model's maximum" in str(failure) for failure in result.failures)


async def test_wrong_arguments_are_refused(database: Database, tmp_path: Path) -> None:
    code, _, errors = await replay(database, str(MESSY), "--strategy", "brief")
    assert code == 1
    assert "strategy must be one of full, slim" in errors
    (tmp_path / "bad.jsonl").write_text('{"messages": 7}\n')
    code, _, errors = await replay(database, str(tmp_path / "bad.jsonl"))
    assert code == 1
    assert "line 1: not a conversation: the line fits no dialect: looked for messages (openai_chat; " in errors


@pytest.mark.skipif(not REAL.exists(), reason="no recorded transcripts here (see tests/conftest.py)")
async def test_a_real_session_costs_less_and_loses_nothing(database: Database) -> None:
    code, out, errors = await replay(database, str(REAL), "--strategy", "slim", "--json")
    assert (code, errors) == (0, "")
    (result,) = json.loads(out)
    assert result["calls"] == 242
    assert result["prices"][0]["price"] < 0.7
    assert result["prices"][1]["price"] < 0.7
    assert result["prefix_share"] > 0.85


# The pieces


def assistant_message(text: str | None, *arguments: str) -> dict[str, Any]:
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "tool", "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def raws(*messages: Mapping[str, Any]) -> list[bytes]:
    return [raw_json.dump(message) for message in messages]


def test_annotations_are_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"id": "a", "meta": {}, "x_by": 1, "messages": [{"role": "user", "content": "hi", "x_ts": 1}, '
        '{"role": "assistant", "content": "ho", "x_usage": {}}, {"role": "user", "content": "hm"}]}\n\n'
    )
    (step,) = load_transcript(path).conversations[0].steps
    assert step.request(ReplyForm(model="m")).body == b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    assert step.reply == {"role": "assistant", "content": "ho"}
    with pytest.raises(BadTranscript, match="No such file"):
        load_transcript(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "text", ["Done.", "One.\n\nTwo.", "```py\nx\n```", "See:\n\n```py\nx\n```\nDone.", "a <terse> b", "~~~\nx", "  "]
)
@pytest.mark.parametrize("place", range(12))
def test_tags_are_written_where_they_can_be_stripped(text: str, place: int) -> None:
    tagged = with_tag(text, ("s", place), 1.0)
    if tagged == text:
        assert text.startswith(("```", "~~~")) or OPEN in text or not text.strip()
    else:
        assert tagged.count(OPEN) == tagged.count(CLOSE) == 1
        assert strip_terse(tagged)[0] == text


def test_share_of_tags_is_near_the_requested_share() -> None:
    def tagged(share: float) -> int:
        return sum(with_tag("Done.", (n,), share) != "Done." for n in range(1000))

    assert tagged(0.0) == 0
    assert tagged(1.0) == 1000
    assert 640 < tagged(0.7) < 760


def test_differences_between_replies_are_found() -> None:
    same = assistant_message("words", '{"a":1}')
    assert list(compare_reply({**same, "refusal": None}, same)) == []
    assert list(compare_reply(assistant_message(""), assistant_message(None))) == []
    (words,) = compare_reply(assistant_message("word"), assistant_message("words"))
    assert words.startswith("content differs at character 4")
    (spaced,) = compare_reply(assistant_message("words", '{"a": 1}'), same)
    assert spaced.startswith("tool call 0 differs")
    assert list(compare_reply(assistant_message("words"), same)) == ["0 tool calls instead of 1"]


def test_a_request_that_was_too_long_may_be_tried_once_more() -> None:
    overflow = RecordedRequest(body=b"", status=400, refusal=b'{"error":{"code":"context_length_exceeded"}}')
    other = RecordedRequest(body=b"", status=400, refusal=b'{"error":{"code":"invalid_value"}}')
    fine = RecordedRequest(body=b"", status=200, refusal=None)
    assert is_mended([overflow, fine])
    assert not any(map(is_mended, ([fine], [overflow], [other, fine], [overflow, overflow, fine], [])))


def test_differences_in_the_store_are_found() -> None:
    sent = raws(user("a"), assistant_message("b"), user("c"), assistant_message("d"))
    reply = StoredClientMessage(raw=b'{"content":"b","role":"assistant","refusal":null}', is_reply=True)
    held = [StoredClientMessage(raw=sent[0], is_reply=False), reply, StoredClientMessage(raw=sent[2], is_reply=False)]
    assert list(check_stored(sent[:3], held)) == []
    assert list(check_stored(sent, held)) == [(-1, "3 messages are stored instead of 4")]
    respelled = StoredClientMessage(raw=b'{"content":"c","role":"user"}', is_reply=False)
    ((place, what),) = check_stored(sent[:3], [*held[:2], respelled])
    assert place == 2
    assert what.startswith("stored as")
    assert [place for place, _ in check_stored(sent[:3], [held[0], held[2], reply])] == [1, 2]


def shown(*messages: Mapping[str, Any], tools: bytes = b"") -> RequestParts:
    return RequestParts(tools=tools, messages=tuple(raws(*messages)))


def test_a_request_of_the_same_epoch_begins_with_the_one_before() -> None:
    before = shown(user("a"), assistant_message("b"))
    after = shown(user("a"), assistant_message("b"), user("c"))
    assert list(check_prefix(after, before, same_epoch=True)) == []
    assert list(check_prefix(after, None, same_epoch=True)) == []
    (difference,) = check_prefix(shown(user("a"), assistant_message("x")), before, same_epoch=True)
    assert "message 1 of the 2" in difference
    assert len(list(check_prefix(shown(user("a")), before, same_epoch=True))) == 1
    assert list(check_prefix(shown(user("z")), before, same_epoch=False)) == []
    with_tools = shown(user("a"), assistant_message("b"), user("c"), tools=b"[{}]")
    assert len(list(check_prefix(with_tools, before, same_epoch=True))) == 1


def test_prices_by_hand() -> None:
    counter = Counter("gpt-4.1")
    first, second = (
        shown(user("a b c"), assistant_message("d")),
        shown(user("a b c"), assistant_message("d"), user("e")),
    )
    sizes = counter.sizes(second)
    one = measure(counter, first, None)
    assert (one.tokens, one.repeated, one.later) == (sum(sizes[:2]), 0, 0)
    assert one.price == pytest.approx((1.25 * sum(sizes[:2]), sum(sizes[:2])))
    two = measure(counter, second, first)
    assert (two.tokens, two.repeated, two.later) == (sum(sizes), sum(sizes[:2]), sum(sizes))
    assert two.price == pytest.approx((0.1 * sum(sizes[:2]) + 1.25 * sizes[2], 0.5 * sum(sizes[:2]) + sizes[2]))
    total = ReplayTotals(client=one + two, model=one + two)
    assert total.price(0) == pytest.approx(1.0)
    assert common(first.blocks, second.blocks) == 2


def test_own_instructions_are_priced_apart() -> None:
    counter = Counter("gpt-4.1")
    given = shown({"role": "system", "content": "Be kind."}, user("a"))
    sent = shown({"role": "system", "content": "Be kind.\n\nAnd brief, please."}, user("a"))
    own, tools = own_tokens(counter, sent, given)
    assert own == counter.count(sent.messages[0]) - counter.count(given.messages[0]) > 0
    assert tools == 0
    written = measure(counter, sent, None, given=given)
    read = measure(counter, sent, sent, given=given)
    assert written.own == pytest.approx((1.25 * own, own))
    assert read.own == pytest.approx((0.1 * own, 0.5 * own))
    tally = ReplayTotals(client=measure(counter, given, None), model=written)
    assert tally.price(0) == pytest.approx(1.0)
    assert tally.own_price(1) > 0


def test_own_tools_are_priced_with_the_instructions() -> None:
    """They stand before everything, so that what stood there alone before is written anew."""
    counter = Counter("gpt-4.1")
    function = {"name": "context_search", "description": "Find what was said.", "parameters": {"type": "object"}}
    tools = raw_json.dump([{"type": "function", "function": function}])
    given, sent = shown(user("a")), shown(user("a"), tools=tools)
    size = counter.count_tools(tools)
    assert size > 10
    assert own_tokens(counter, sent, given) == (0, size)
    assert own_tokens(counter, sent, sent) == (0, 0)
    come = measure(counter, sent, given, given=given)
    assert (come.tokens, come.repeated) == (size + counter.count(sent.messages[0]), 0)
    assert come.own == pytest.approx((1.25 * size, size))
    stay = measure(counter, sent, sent, given=given)
    assert stay.own == pytest.approx((0.1 * size, 0.5 * size))


def test_lost_references_by_hand() -> None:
    long_text = json.dumps({"path": "src/a.py", "text": "x " * 150 + "settings.load_all"})
    question = user("look at src/a.py, b_c and settings.load_all")
    given = raw_json.dump(question)
    first, second = (
        step({"messages": [question, assistant_message(None, arguments)]})
        for arguments in ('{"path":"src/a.py"}', long_text)
    )

    def counted(one: RecordedCall, shown: bytes) -> Sequence[int]:
        losses = PastIdentifiers().losses(one, given, shown)
        return [losses.referring, losses.lost, losses.pointing, losses.lost_pointing]

    assert counted(first, b"... src/a.py ...") == [1, 0, 1, 0]
    assert counted(first, b"nothing") == [1, 1, 1, 1]
    assert counted(second, b"... src/a.py ...") == [1, 1, 1, 0]
    assert PastIdentifiers().losses(first, b"hello", b"").referring == 0


def step(line: Mapping[str, Any]) -> RecordedCall:
    (one,) = steps_of(line, "openai_chat")
    return one


def test_identifiers_of_a_text() -> None:
    found = identifiers('{"a":"src/app.py and order_id 77, HATX4321 or it\\nlib.load"}')
    assert found == ["src/app.py", "order_id", "HATX4321", "lib.load"]


def test_a_table_has_one_cell_for_each_column() -> None:
    rows = as_markdown([ReplayResult(file="f", strategy="full", tally=ReplayTotals())]).splitlines()
    assert [row.count("|") for row in rows] == [len(COLUMNS) + 1] * 3


def test_edit_readiness_by_hand() -> None:
    edit = '{"path": "a.py", "old_string": "total = 1", "new_string": "total = 2"}'
    one = step({"messages": [user("change it"), assistant_message(None, edit)]})
    seen = raw_json.dump({"role": "tool", "tool_call_id": "c", "content": "  3\u2192total = 1\n  4\u2192print(total)"})
    other = step({"messages": [user("look"), assistant_message(None, '{"path": "a.py"}')]})
    counter = EditCounter()

    assert counter.count(one, [raw_json.dump(user("change it")), seen], "openai_chat") == Edits(calls=1, ready=1)
    assert counter.count(one, [raw_json.dump(user("change it"))], "openai_chat") == Edits(calls=1, ready=0)
    assert counter.count(other, [seen], "openai_chat") == Edits()
    assert (Edits(calls=1, ready=1) + Edits(calls=1)).readiness == 0.5
