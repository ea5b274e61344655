"""The table of new tasks: it agrees with the data, where that is there, and says so where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import left_out, new_tasks
from tersely.strategies.epochs.new_tasks import Evidence, TaskClues

TRANSCRIPTS = new_tasks.ROOT.parent / "shared" / "data" / "transcripts"


def test_missing_data_is_named_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_tasks, "TABLE", tmp_path / "new_tasks.md")
    monkeypatch.setattr("sys.argv", ["new_tasks", str(tmp_path)])
    with pytest.raises(SystemExit, match="no transcripts"):
        new_tasks.main()
    assert not (tmp_path / "new_tasks.md").exists()


def test_labels_and_moved_messages_are_counted(tmp_path: Path) -> None:
    questions = ["fix the parser", "continue", "New task: write a poem"]
    messages = [
        message
        for text in questions
        for message in ({"role": "user", "content": text}, {"role": "assistant", "content": "done"})
    ]
    for name in (*new_tasks.SETS, *new_tasks.FURTHER):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name, "messages": messages}) + "\n")
    labels = [
        {"set": new_tasks.SETS[0], "conversation": new_tasks.SETS[0], "message": number, "label": label}
        | {"sha256": new_tasks.digest(messages[number]["content"])}
        for number, label in ((2, "continue"), (4, "new"))
    ]
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps(label) + "\n" for label in labels))
    report = new_tasks.render(tmp_path, file)
    assert f"| `{new_tasks.SETS[0]}` | 2 | 1 | 1 | 1 | 1.000 | 1.000 |" in report
    file.write_text(json.dumps(labels[0] | {"sha256": "0"}) + "\n")
    with pytest.raises(SystemExit, match="one of another text"):
        new_tasks.render(tmp_path, file)


@pytest.mark.skipif(not TRANSCRIPTS.is_dir(), reason=f"there are no transcripts in {TRANSCRIPTS}")
@pytest.mark.slow
def test_the_table_is_current_and_precise() -> None:
    report = new_tasks.render(TRANSCRIPTS)
    assert new_tasks.TABLE.read_text() == report
    counts = new_tasks.measure_labelled(TRANSCRIPTS, new_tasks.LABELS)
    moved = new_tasks.measure_moved(TRANSCRIPTS)
    assert sum(count.messages for count in counts.values()) >= 300
    assert sum(count.right for count in counts.values()) >= 0.95 * sum(count.taken for count in counts.values()) > 0
    everything = [*counts.values(), *moved.values()]
    taken = sum(count.taken for count in everything)
    assert sum(count.right for count in everything) >= 0.95 * taken
    assert taken >= 100


def test_hardly_a_sentence_that_only_looks_like_an_announcement_is_taken() -> None:
    announced, others = new_tasks.measure_announced()
    assert announced.messages >= 50
    assert others.messages >= 40
    assert others.taken <= 0.05 * announced.right
    assert announced.right >= 0.5 * announced.new


@pytest.mark.skipif(not TRANSCRIPTS.is_dir(), reason=f"there are no transcripts in {TRANSCRIPTS}")
def test_hardly_a_follow_up_is_taken_for_a_new_task() -> None:
    count = new_tasks.measure_all(TRANSCRIPTS, new_tasks.LABELS)
    labelled = new_tasks.measure_labelled(TRANSCRIPTS, new_tasks.LABELS)
    assert count.messages > 1_000
    assert count.taken - sum(each.right for each in labelled.values()) <= 0.001 * count.messages


def test_rules_are_chosen_without_the_set_that_is_left_out() -> None:
    def sample(name: str, keywords: int, ties: int, *, is_new: bool) -> left_out.Sample:
        words = frozenset(f"{name}{number}" for number in range(keywords))
        opening = TaskClues(kinds=frozenset({"long"}), keywords=words, names=frozenset())
        return left_out.Sample(name=name, is_new=is_new, is_moved=False, is_announced=False, opening=opening, ties=ties)

    one = [sample("one", 10, 2, is_new=True), sample("one", 10, 4, is_new=False)]
    other = [sample("other", 20, 0, is_new=True), sample("other", 10, 1, is_new=False)]
    assert left_out.choose(one) == {"long": Evidence(10, 0.25)}
    assert left_out.choose(other) == {"long": Evidence(18, 0.0)}
    rows = left_out.render([*one, *other], ["one", "other"])
    assert "| `one` | long 18, 0.00 | 2 | 1 | 0 | 0 | 0 | 0 |" in rows
    assert "| `other` | long 10, 0.25 | 2 | 1 | 2 | 1 | 0 | 0 |" in rows
