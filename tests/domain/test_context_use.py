"""The use of a context by a reply: the texts that it edits."""

from __future__ import annotations

import json

import pytest

from tersely.domain.history.context_use import readable_text, replaced_texts, short_values, stands_in
from tersely.domain.messages import ToolCall
from tests.builders import assistant, call, result

OLD = "def load(path):\n    return open(path)"


def edit(**arguments: object) -> ToolCall:
    return call("c1", "edit", arguments)


@pytest.mark.parametrize("name", ["old_string", "oldText", "old_str", "old_text", "oldString"])
def test_edit_calls_name_the_text_that_they_replace(name: str) -> None:
    assert replaced_texts(edit(path="a.py", **{name: OLD, "new": "x"})) == [OLD]


def test_calls_with_several_edits_name_all_of_them() -> None:
    edits = [{"old_string": "one", "new_string": "1"}, {"old_string": "two", "new_string": "2"}]

    assert sorted(replaced_texts(edit(edits=edits))) == ["one", "two"]


def test_other_calls_replace_nothing() -> None:
    assert replaced_texts(edit(command="sed -i s/a/b/ x")) == []
    assert replaced_texts(edit(old_string="")) == []
    assert replaced_texts(ToolCall(id="c", name="edit", arguments='{"old_string": "broken')) == []


@pytest.mark.parametrize("form", ["{n:>6}→{line}", "{n}\t{line}", "  {n}\t{line}"])
def test_numbers_of_lines_are_set_aside(form: str) -> None:
    read = "\n".join(form.format(n=n, line=line) for n, line in enumerate(OLD.split("\n"), start=9))

    assert stands_in(OLD, [readable_text(result("c1", read))])


def test_a_text_that_was_written_before_stands_in_the_call_that_wrote_it() -> None:
    text = readable_text(assistant("Writing.", call("c1", "write", {"path": "a.py", "content": f"import os\n{OLD}\n"})))

    assert stands_in(OLD, [text])
    assert json.dumps(OLD)[1:-1] not in text


def test_half_of_a_text_is_not_enough() -> None:
    first, second = OLD.split("\n")

    assert not stands_in(OLD, [first, second])


def test_short_values_omit_written_content() -> None:
    assert short_values(json.dumps({"path": "src/a.py", "text": "x" * 201})) == "src/a.py"
