"""Messages that start a new task, and messages that never do (Fifth, "When to Compress vs. Retrieve")."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from tersely.domain.history.history import Entry
from tersely.domain.history.turns import group_turns
from tersely.strategies.epochs.new_tasks import announces_new_task, starts_new_task
from tests.builders import assistant, call, result, user
from tests.strategies.histories import place

BAKERY = (
    "Draft a marketing campaign for a bakery in Lisbon: three posters, radio spots during breakfast, a loyalty "
    "card, an opening festival with musicians, free pastries, balloons, and vouchers for neighbours."
)


@pytest.mark.parametrize(
    "text",
    [
        "New task: write a changelog.",
        "new task\nwrite a changelog",
        "OK, thanks! Next task: the changelog.",
        "Great. Here's a new task for you: translate the manual.",
        "On a different topic, how do I renew my passport?",
        "On a completely different subject: what is a monad?",
        "Different topic. What is a monad?",
        "Let's change the subject. What is a monad?",
        "Let\u2019s switch topics: what is a monad?",
        "I'd like to switch gears now. Explain monads.",
        "Switching gears: explain monads",
        "Unrelated question: what is a monad?",
        "Now for something completely different: a man with a tape recorder",
        "Unrelated to the above, what is a monad?",
        "Forget everything above. Write a poem.",
        "Let's talk about something else.",
        "Can we switch to another topic? What is a monad?",
        "Ignore all the above. Write a poem.",
        "Next task. Write a poem.",
        "Change of topic: monads",
        "Neues Thema: Monaden",
        "Nouvelle tâche : écris un poème",
        "Nuevo tema: las mónadas",
        "换个话题，什么是单子？",
        "新しいタスク: モナドを説明して",
    ],
)
def test_an_announced_task_is_a_new_task(text: str) -> None:
    assert announces_new_task(text)


@pytest.mark.parametrize(
    "text",
    [
        "continue",
        "Add a new task to the todo list.",
        "Create another task in Jira for the parser",
        "The next task is failing, why?",
        "new tasks are not shown in the list",
        "What was the different topic that you mentioned?",
        "Let's switch to OpenAI.",
        "switch to a bar graph with the % code on the y-axis",
        "Is that error unrelated to my change?",
        "unrelated changes should not be committed",
        "Forget that, use a list instead.",
        "Forget about the tests for now.",
        "Ignore everything before the first blank line when you parse it.",
        "The topic of the mail must be different.",
        "Change the subject line of the mail to hello",
        "change the subject of the mail, please",
        "Start over with the second approach.",
        "btw, can we keep the old code around?",
        "A different approach: use a dictionary.",
        "neue Aufgaben werden nicht angezeigt",
        "nouvelle tâche ajoutée mais invisible",
        "Nueva tarea no aparece en la lista",
        "",
        "   ",
    ],
)
def test_talk_about_tasks_announces_none(text: str) -> None:
    assert not announces_new_task(text)


def history(question: str, *, minutes: float, output: str = "", before: str = "Why does lexer.py drop tokens?"):
    messages = [user(before), assistant(None, call("c1")), result("c1", output or "ok"), assistant("An off by one.")]
    entries: tuple[Entry, ...] = place(*messages, user(question))
    late = replace(entries[-1], created_at=entries[-2].created_at + timedelta(minutes=minutes))
    return group_turns((*entries[:-1], late))


def is_new(question: str, *, minutes: float = 60, **more: str) -> bool:
    *before, running = history(question, minutes=minutes, **more)
    return starts_new_task(running, before, pause=300)


def test_a_long_message_without_a_tie_is_one_after_a_pause() -> None:
    assert is_new(BAKERY)
    assert not is_new(BAKERY, minutes=4)


@pytest.mark.parametrize(
    "text",
    [
        "Hi! I need to cancel my flight to Lisbon next Monday, please.",
        "Good morning, please write a poem about the harbour and the bridges of Porto.",
        "Hola, escribe un poema sobre el puerto de Oporto por favor.",
        "I've recently placed an order for shoes and cannot find its confirmation mail or invoice.",
        "I\u2019m planning a holiday in Norway with trains, ferries, cabins and glaciers.",
    ],
)
def test_a_greeting_or_an_introduction_after_a_pause_begins_a_new_task(text: str) -> None:
    assert is_new(text)
    assert not is_new(text, minutes=4)
    assert not is_new(text, before=text)
    assert not is_new(text.replace(".", ", as before."))


@pytest.mark.parametrize(
    "text",
    [
        "Hi",
        "Hello, please continue.",
        "Hey! Good morning to you, how is it going?",
        "Hi, and add a test of the harbour, the ferry and the train to it, please.",
        "Hi, lexer.py has another fault in the harbour, ferry and train branches.",
        "Hello! The lexer drops tokens in the harbour.",
        "I've found the harbour, the ferry, the train, the cabin and the holiday.",
        "Hinges, harbours, ferries, trains and cabins are missing.",
    ],
)
def test_a_greeting_alone_or_with_a_tie_is_no_new_task(text: str) -> None:
    assert not is_new(text)


@pytest.mark.parametrize("tie", ["The vouchers are printed.", "see /srv/bakery/plan.md", "a festival is planned"])
def test_one_common_keyword_anywhere_in_the_session_is_a_tie(tie: str) -> None:
    question = f"{BAKERY} /srv/bakery/plan.md"
    assert is_new(question)
    assert not is_new(question, output=tie)
    assert not is_new(question, before=tie)


@pytest.mark.parametrize("words", ["Do it again", "And then", "Instead", "As before", "You still have to"])
def test_message_that_refers_back_is_no_new_task(words: str) -> None:
    assert not is_new(f"{words}: {BAKERY}")


@pytest.mark.parametrize("question", ["continue", "yes", "go on", "Please fix that", "write a sonnet about autumn", ""])
def test_short_message_after_a_pause_is_no_new_task(question: str) -> None:
    assert not is_new(question, minutes=100_000)


def test_first_turn_is_no_new_task_and_later_steps_change_nothing() -> None:
    *before, running = history("New task: " + BAKERY, minutes=0)
    assert not starts_new_task(running, [], pause=300)
    later = replace(running, entries=(*running.entries, *place(assistant("I begin."))))
    assert starts_new_task(later, before, pause=300)
    unopened = replace(running, entries=place(assistant("I begin.")))
    assert not starts_new_task(unopened, before, pause=300)
