"""Figures that README and docs quote are those of the measurements in bench/."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.docs.pages import read

RESULTS = {(each["file"], each["strategy"]): each for each in json.loads(read("bench/replay.json"))}


def price(file: str, strategy: str) -> float:
    return float(RESULTS[file, strategy]["prices"][0]["price"])


def whole_price(each: dict[str, Any]) -> float:
    """With Tersely's own instructions and tools."""
    return float(each["prices"][0]["price"] + each["prices"][0]["own_instructions"])


def cell(each: dict[str, Any]) -> str:
    share = 100 * each["sent_tokens"] / each["client_tokens"]
    return f"{whole_price(each):.2f}, {share:.0f} %"


def test_readme_sells_with_the_price_of_the_longest_session() -> None:
    longest = RESULTS["pi_sessions", "slim, auto"]
    first = " ".join(read("README.md").split("![")[0].split())
    assert f"session of {longest['calls']} calls cost {100 * whole_price(longest):.0f} %" in first


@pytest.mark.parametrize(
    ("row", "file"),
    [
        ("coding session of 484 calls (pi)", "pi_sessions"),
        ("two coding sessions of 242 calls", "claude_code_sessions"),
        ("short conversations (tau-bench)", "tau_bench_airline_gpt4o"),
    ],
)
def test_readme_table_quotes_the_replay(row: str, file: str) -> None:
    (line,) = [line for line in read("README.md").splitlines() if line.startswith(f"| {row}")]
    cells = [each.strip() for each in line.strip("| ").split("|")][1:]
    assert cells == [cell(RESULTS[file, f"slim, {policy}"]) for policy in ("auto", "every_request")]


@pytest.mark.parametrize("strategy", ["slim, auto", "slim, auto, repeats"])
def test_readme_table_and_picture_have_the_whole_price_and_what_is_lost_and_ready(strategy: str) -> None:
    table = read("README.md").split("<!-- slim -->")[1].split("<!-- /slim -->")[0]
    picture = read("docs/pictures/savings.svg")
    for (file, measured), each in RESULTS.items():
        if measured != strategy:
            continue
        whole = f"{whole_price(each):.3f}"
        lost = f"{each['lost_pointing']} of {each['pointing_calls']}" if each["pointing_calls"] else ""
        ready = f"{each['edits_ready']} of {each['edits']}" if each["edits"] else ""
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {file} ")]
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        assert cells[4 if strategy.endswith("repeats") else 1 :][:3] == [
            whole, lost or "none refer", ready or "no edits",
        ]  # fmt: skip
        shown = [whole, f"{lost} lost" if lost else "", f"{ready} edits ready" if ready else ""]
        assert f">{', '.join(filter(None, shown))}</text>" in picture


def test_readme_counts_the_calls_of_the_replay() -> None:
    calls = sum(each["calls"] for (_, strategy), each in RESULTS.items() if strategy == "full")
    assert f"{calls:,} calls under each strategy" in " ".join(read("README.md").split())


def test_decisions_quote_the_replay_and_the_recall() -> None:
    text = " ".join(read("docs/decisions.md").split())
    short, long = "tau_bench_airline_gpt4o", "pi_sessions"
    assert f"rebuilding costs {price(short, 'slim, every_request'):.2f} times" in text
    assert f"epochs {price(short, 'slim, auto'):.2f} times" in text
    assert f"rebuilding costs {price(long, 'slim, every_request'):.2f}, epochs {price(long, 'slim, auto'):.2f}" in text
    recall = read("bench/recall.md")
    for data in ("LoCoMo", "BEAM"):
        section = re.split(rf"(?m)^## {data}[^\n]*held out[^\n]*$", recall)[1].split("\n## ")[0]
        rows = {line.split("|")[1].strip(): line.split("|") for line in section.splitlines() if line.startswith("| ")}
        ours, plain = rows["**Tersely, `relevant`**"][3].strip(), rows["BM25 k1 1.2 b .75"][3].strip()
        assert re.search(rf"0{re.escape(ours)} on {data} \((?:plain BM25 )?0{re.escape(plain)}\)", text), (data, ours)


def test_speed_table_quotes_the_benchmark() -> None:
    tables = read("bench/results.md") + read("bench/growth.md") + read("bench/recorded.md")
    measured = [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", tables)]
    table = [line for line in read("docs/speed.md").splitlines() if re.search(r"\| [\d.,]+ \|", line)]
    shown = [each.strip() for line in table for each in line.strip("| ").split("|")[1:]]
    missing = []
    for each in shown:
        number = each.replace(",", "")
        step = 10 ** -len(number.partition(".")[2]) / 2
        if not any(abs(value - float(number)) <= step + 1e-9 for value in measured):
            missing.append(each)
    assert shown
    assert missing == []
