"""`python -m bench.new_tasks [DIRECTORY]`: how well `tiered` tells new tasks from follow-ups, on real conversations.

Looks for the conversations in DIRECTORY, else in `TERSELY_TRANSCRIPTS`, else beside the checkout in
`../shared/data/transcripts`. `bench/new_tasks.jsonl` has a label for each follow-up of a user, given by reading the
conversation around it; the texts are not in this repository, only their digests. `bench/new_task_announcements.jsonl`
has sentences that announce a new task, and others that only look so. Writes `bench/new_tasks.md`.
"""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from bench import left_out
from bench.left_out import sample
from tersely.dialects.registry import DIALECTS
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Entry
from tersely.domain.history.turns import Turn, group_turns, number_turns
from tersely.domain.messages import Message
from tersely.strategies.epochs.new_tasks import announces_new_task, starts_new_task

ROOT: Final = Path(__file__).parent.parent
TABLE: Final = ROOT / "bench" / "new_tasks.md"
LABELS: Final = ROOT / "bench" / "new_tasks.jsonl"
ANNOUNCEMENTS: Final = ROOT / "bench" / "new_task_announcements.jsonl"
# Natural logarithm of 1/0.05: so many events at most, at 95 % confidence, where none was seen.
NONE_SEEN: Final = 3.0
# Sets whose messages are labelled, and further ones whose first messages are put behind other conversations.
SETS: Final = (
    "aider_chat_history",
    "claude_code_sessions",
    "pi_sessions",
    "tau_bench_airline_gpt4o",
    "bfcl_multi_turn_executed",
)
FURTHER: Final = ("swe_agent_demos", "openhands_examples")
# Whose first message is the program's own.
STARTS_WITH_A_BANNER: Final = "aider_chat_history"
AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
# The default of `working_age`: the pause after which words alone can speak for a new task.
PAUSE: Final = 300
# A message from another conversation of its own set comes from so many conversations further on.
APART: Final = 7


@dataclass(frozen=True, slots=True)
class Line:
    """A message of a conversation, with its number in the file and the digest of its text."""

    number: int
    digest: str
    message: Message


@dataclass(slots=True)
class Count:
    """Follow-ups by what they are and what they are taken for."""

    messages: int = 0
    new: int = 0
    taken: int = 0
    right: int = 0

    def add(self, *, is_new: bool, is_taken: bool) -> None:
        self.messages += 1
        self.new += is_new
        self.taken += is_taken
        self.right += is_new and is_taken

    def row(self, name: str) -> str:
        precision = f"{self.right / self.taken:.3f}" if self.taken else "none taken"
        recall = f"{self.right / self.new:.3f}" if self.new else ""
        return f"| {name} | {self.messages} | {self.new} | {self.taken} | {self.right} | {precision} | {recall} |"


def load(directory: Path, name: str) -> dict[str, list[Line]]:
    """The conversations of a set by their ids, without instructions and what cannot be read."""
    found: dict[str, list[Line]] = {}
    for text in (directory / f"{name}.jsonl").read_text().splitlines():
        record = json.loads(text)
        found[record["id"]] = list(_lines(record["messages"]))
    return found


def _lines(messages: Iterable[dict[str, Any]]) -> Iterator[Line]:
    for number, message in enumerate(messages):
        wire = {name: value for name, value in message.items() if not name.startswith("x_")}
        try:
            read = DIALECTS["openai_chat"].read_message(json.dumps(wire).encode())
        except InvalidRequest:
            continue
        if not read.is_instruction:
            yield Line(number, digest(message.get("content")), read)


def digest(content: object) -> str:
    """The digest by which a label names a text."""
    if isinstance(content, list):
        content = " ".join(part.get("text", "") for part in content if isinstance(part, dict))
    return sha256(str(content or "").encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """A message of the user in its own conversation or, ``is_moved``, behind another one. ``name``: the set it is of.

    ``is_new`` None: it has no label. ``same_set``: of a moved one, whether the other conversation is of its set.
    """

    name: str
    before: Sequence[Message]
    message: Message
    is_new: bool | None
    is_moved: bool = False
    same_set: bool = False

    def split(self) -> tuple[Turn, list[Turn]]:
        """Return its turn and those before it, with a pause of an hour in front of each message."""
        messages = [*self.before, self.message]
        numbered = zip(messages, number_turns(messages), strict=True)
        entries = [
            Entry(seq=seq, turn=turn, message=each, tokens=1, created_at=AT + timedelta(hours=seq))
            for seq, (each, turn) in enumerate(numbered, start=1)
        ]
        *turns, running = group_turns(entries)
        return running, turns

    @property
    def is_taken(self) -> bool:
        """True if the message is taken for a new task."""
        running, turns = self.split()
        return starts_new_task(running, turns, pause=PAUSE)


def follow_ups(directory: Path, labels: Path) -> list[FollowUp]:
    """Every follow-up of every set in its own conversation. Exits where a label does not fit the data."""
    found: list[FollowUp] = []
    known: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for text in labels.read_text().splitlines():
        label = json.loads(text)
        known.setdefault((label["set"], label["conversation"]), {})[label["message"]] = label
    for name in (*SETS, *FURTHER):
        for conversation, lines in load(directory, name).items():
            of_this = known.pop((name, conversation), {})
            messages = [line.message for line in lines]
            starts = [at for at, message in enumerate(messages) if message.starts_turn][1:]
            for at in [at for at, line in enumerate(lines) if at in starts or line.number in of_this]:
                label = of_this.pop(lines[at].number, None)
                if label is not None and label["sha256"] != lines[at].digest:
                    sys.exit(f"the label of message {label['message']} of {conversation} is one of another text")
                is_new = None if label is None else label["label"] == "new"
                found.append(FollowUp(name=name, before=messages[:at], message=messages[at], is_new=is_new))
            if of_this:
                sys.exit(f"the labels of messages {sorted(of_this)} of {conversation} are of another text")
    if known:
        sys.exit(f"the labels of {sorted(known)} are of another text")
    return found


def moved(directory: Path) -> Iterator[FollowUp]:
    """First messages of conversations, each put behind a conversation of every set: new by the way they are made."""
    conversations = {name: list(load(directory, name).values()) for name in (*SETS, *FURTHER)}
    for guest, theirs in conversations.items():
        if guest == STARTS_WITH_A_BANNER:
            continue
        for number, lines in enumerate(theirs):
            first = next((line.message for line in lines if line.message.starts_turn), None)
            if first is None:
                continue
            for host, hosts in conversations.items():
                if host == guest and len(hosts) <= APART:
                    continue
                at = number + APART if host == guest else number
                before = [line.message for line in hosts[at % len(hosts)]]
                same = host == guest
                yield FollowUp(name=guest, before=before, message=first, is_new=True, is_moved=True, same_set=same)


def measure_labelled(directory: Path, labels: Path) -> dict[str, Count]:
    """The labelled follow-ups, by set."""
    counts = {name: Count() for name in SETS}
    for each in follow_ups(directory, labels):
        if each.is_new is not None:
            counts[each.name].add(is_new=each.is_new, is_taken=each.is_taken)
    return counts


def measure_moved(directory: Path) -> dict[str, Count]:
    """The moved messages, by whether the other conversation is of the same set."""
    same, other = Count(), Count()
    for each in moved(directory):
        (same if each.same_set else other).add(is_new=True, is_taken=each.is_taken)
    return {"behind a conversation of the same set": same, "behind a conversation of another set": other}


def render_left_out(directory: Path, labels: Path) -> list[str]:
    """Render the results of rules on a set that they were chosen without."""
    samples = []
    for each in (*follow_ups(directory, labels), *moved(directory)):
        running, turns = each.split()
        text = "\n".join(entry.message.text for entry in running.opening)
        new = sample(each.name, text, turns, is_new=bool(each.is_new), is_moved=each.is_moved)
        samples.append(new)
    return left_out.render(samples, (*SETS, *FURTHER))


def measure_all(directory: Path, labels: Path) -> Count:
    """All follow-ups of all sets in their own conversations, also those without a label."""
    count = Count()
    for each in follow_ups(directory, labels):
        count.add(is_new=False, is_taken=each.is_taken)
    return count


def measure_announced() -> tuple[Count, Count]:
    """Sentences that announce a new task, and sentences that only look so."""
    announced, others = Count(), Count()
    for text in ANNOUNCEMENTS.read_text().splitlines():
        label = json.loads(text)
        is_new = label["label"] == "new"
        (announced if is_new else others).add(is_new=is_new, is_taken=announces_new_task(label["text"]))
    return announced, others


def _render_all(count: Count, labelled: Iterable[Count]) -> list[str]:
    if count.taken:
        right = sum(each.right for each in labelled)
        return [
            f"Of all {count.messages} follow-ups in the transcripts, labelled or not, {count.taken} are taken for a",
            f"new task; {right} of these are labelled `new`.",
        ]
    most = NONE_SEEN / max(1, count.messages)
    return [
        f"Of all {count.messages} follow-ups in the transcripts, labelled or not, none is taken for a new task:",
        f"at 95 % confidence, fewer than {most:.2%} of the follow-ups of such users are.",
    ]


def _render_precision(count: Count) -> list[str]:
    if not count.taken or count.right < count.taken:
        return ["Labelled and moved."]
    least = math.exp(-NONE_SEEN / count.taken)
    return [
        f"Labelled and moved. {count.taken} rightly taken messages show a precision of {least:.2f} or more at 95 %",
        "confidence.",
    ]


def _total(counts: Iterable[Count]) -> Count:
    whole = Count()
    for count in counts:
        whole.messages += count.messages
        whole.new += count.new
        whole.taken += count.taken
        whole.right += count.right
    return whole


def render(directory: Path, labels: Path = LABELS) -> str:
    """The whole report."""
    head = [
        "| | follow-ups | new | taken for new | of these new | precision | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    announced, others = measure_announced()
    labelled = measure_labelled(directory, labels)
    moved = measure_moved(directory)
    whole = _total((*labelled.values(), *moved.values()))
    return "\n".join(
        [
            "# New tasks and follow-ups",
            "",
            "Made by `make bench-new-tasks`: what `tiered` takes for a new task while its budget is under pressure.",
            "Each message is judged as if it came after an hour's pause, which is the hardest case: without a pause",
            "only what the user announces is a new task.",
            "",
            "## Labelled by reading",
            "",
            "Follow-ups of users in real transcripts, in their own conversations. `continue`: it goes on with,",
            "corrects, asks about or builds on what was done before; `new`: what came before is of no use for it.",
            "",
            *head,
            *(count.row(f"`{name}`") for name, count in labelled.items()),
            "",
            *_render_all(measure_all(directory, labels), labelled.values()),
            "",
            "## Moved",
            "",
            "The first message of each conversation, put behind another conversation: new by the way it is made. None",
            "of them can be taken wrongly, so that these rows say something of recall and nothing of precision.",
            "",
            *head,
            *(count.row(name) for name, count in moved.items()),
            "",
            "## Each set left out",
            "",
            "The numbers of the rules chosen again without the set of the row, then measured on that set alone: the",
            "loosest that take no follow-up of the other sets. Follow-ups without a label count as going on.",
            "",
            *render_left_out(directory, labels),
            "",
            "## Announced",
            "",
            "No user of the transcripts announces a new task. So these sentences are written for this table, with",
            "others that only look like announcements. The first measurement took 26 of 50 announcements and 1 of",
            "40 others; three patterns were mended after it, so the row is no independent estimate.",
            "",
            *head,
            _total((announced, others)).row("written announcements"),
            "",
            "## Together",
            "",
            *_render_precision(whole),
            "",
            *head,
            whole.row("all"),
            "",
        ]
    )


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TERSELY_TRANSCRIPTS")
    directory = Path(given) if given else ROOT.parent / "shared" / "data" / "transcripts"
    missing = [name for name in (*SETS, *FURTHER) if not (directory / f"{name}.jsonl").is_file()]
    if missing:
        sys.exit(
            f"no transcripts in {directory} ({', '.join(missing)}): name their directory as an argument or in "
            "TERSELY_TRANSCRIPTS; nothing was measured"
        )
    report = render(directory)
    print(report)
    TABLE.write_text(report)


if __name__ == "__main__":
    main()
