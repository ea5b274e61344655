"""The recall table: what it says of a set whose answers are known, and what it does without one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bench import recall, recall_folds

WORDS = ("dentist", "island", "invoice", "guitar", "violin", "parser", "garden", "bicycle", "window", "kettle")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in recall.SETS.values():
        for part, conversation in (
            ("a", min(i for i in recall.TUNED_ON if i.startswith(name[:4]))),
            ("b", "other"),
        ):
            messages = [
                {"role": "user" if n % 2 == 0 else "assistant", "content": f"About the {word}s {part}.", "x_id": n}
                for n, word in enumerate(WORDS)
            ]
            questions = [
                {"conv_id": conversation, "question": f"Which {word}?", "evidence": [n]} for n, word in enumerate(WORDS)
            ]
            questions.append({"conv_id": conversation, "question": "Anything?", "evidence": []})
            _append(tmp_path / f"{name}.jsonl", [{"id": conversation, "messages": messages}])
            _append(tmp_path / f"{name}_questions.jsonl", questions)
    return tmp_path


def _append(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_table_shows_known_figures(data: Path) -> None:
    report = recall.render(data)
    assert "## LoCoMo, all: 2 conversations, 20 questions" in report
    assert "## BEAM-100k, held out: 1 conversations, 10 questions" in report
    assert report.count("| **Tersely, `relevant`** | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 |") == 6
    assert report.count("| newest messages | .500 | 1.000 |") == 6


def test_folds_judge_each_conversation_and_leave_the_parameters_as_they_are(data: Path) -> None:
    before = [getattr(module, name) for module, name, _ in recall_folds.CHOICES]
    report = recall_folds.render(data)
    assert report.count(" | 1.000 / 1.000 / 1.000 | 1.000 / 1.000 / 1.000 | 1.000 / 1.000 / 1.000 |") == 8
    assert "- none: in 3 of the conversations" in report
    assert [getattr(module, name) for module, name, _ in recall_folds.CHOICES] == before


def test_missing_data_is_reported_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "TABLE", tmp_path / "recall.md")
    monkeypatch.setattr("sys.argv", ["recall", str(tmp_path)])
    with pytest.raises(SystemExit, match="no annotated conversations"):
        recall.main()
    assert not (tmp_path / "recall.md").exists()
