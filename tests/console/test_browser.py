"""The console in a real browser, over the running service."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tersely.console.epoch_reasons import EPOCH_REASONS
from tests.console.conftest import Demo
from tests.support.demo import HOSTILE

AXE = Path(__file__).parents[1] / "data" / "axe.min.js"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Watched:
    """A page, and everything in it that must not happen."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.troubles: list[str] = []
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("request", self._look)

    def _note(self, kind: str, text: str) -> None:
        # The browser itself reports a status of 4xx that a test asks for.
        if kind in {"error", "warning"} and "Failed to load resource" not in text:
            self.troubles.append(f"{kind}: {text}")

    def _look(self, request: Any) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith("data:"):
            self.troubles.append(f"another host: {request.url}")

    def open(self, path: str, **query: object) -> Page:
        """Open a page of the console."""
        response = self.page.goto(f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else ""))
        assert response is not None
        assert response.status == 200, response.status
        return self.page


@pytest.fixture
def watched(browser: Browser, demo: Demo) -> Iterator[Watched]:
    """A page of a fresh visitor; at the end nothing untoward has happened."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    seen = Watched(context.new_page(), demo.url)
    yield seen
    context.close()
    assert seen.troubles == []


def pages(demo: Demo) -> list[tuple[str, dict[str, object]]]:
    """Every view."""
    long: dict[str, object] = {"id": demo.long}
    return [
        ("console/sessions", {}),
        ("console/sessions", {"query": "no such title"}),
        ("console/session", {**long, "call": 20}),
        ("console/session/cache", long),
        ("console/session/try", {**long, "strategy": "tiered"}),
        ("console/session/memory", long),
        ("console/session/hands", long),
        *[("console/session/hands", {**long, "act": act}) for act in ("undo", "compact", "clear", "delete")],
        ("console/session/tools", {**long, "call": 30}),
        ("console/savings", {"by": "model"}),
        ("console/live", {}),
        ("console/search", {"query": "customer"}),
        ("console/memory", {}),
        ("console/session/savings", long),
        ("console/session/try", {**long, "name": "window", "policy": "marks", "high": "9000", "low": "3000"}),
        ("console/search", {**long, "query": "order"}),
        ("console/replay", {}),
        ("console/operator", {}),
        ("docs", {}),
        *[(f"docs/{name}", {}) for name in ("search_session", "create_chat_completion", "set_message_priority")],
    ]


def violations(page: Page) -> list[str]:
    """Return the violations that axe-core finds."""
    # A worker of the browser's own world: the page's policy forbids scripts of others.
    page.evaluate(AXE.read_text())
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [f"{each['id']}: {[node['target'] for node in each['nodes']][:3]}" for each in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible(watched: Watched, demo: Demo, scheme: Literal["light", "dark"]) -> None:
    watched.page.emulate_media(color_scheme=scheme)
    for path, query in pages(demo):
        page = watched.open(path, **query)
        assert violations(page) == [], path


def test_every_view_fits_a_narrow_screen(watched: Watched, demo: Demo) -> None:
    watched.page.set_viewport_size({"width": 360, "height": 740})
    for path, query in pages(demo):
        page = watched.open(path, **query)
        wide = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(each => !each.closest('.wide, svg, .sr, .uplot') && "
            "each.getBoundingClientRect().right > 361).map(each => each.outerHTML.slice(0, 80))"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, (path, wide[:5])


def test_a_session_shows_both_sides_and_why(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.long, call=30, seq=2)
    first = page.locator("#m2")
    expect(first.locator(".said")).to_contain_text("nightly import")
    expect(first.locator(".kept")).to_have_text("log line")
    expect(first.locator(".sent")).to_contain_text("in the activity log")
    expect(page.locator(".kept-added").first).to_contain_text("activity log")
    assert page.locator(".kept-full").count() > 2
    assert page.locator("context-strip .bar").count() == demo.calls
    assert page.locator("context-strip .cut").count() >= 1
    expect(page.locator("dl.call").first).to_contain_text(EPOCH_REASONS["high_watermark"])


def test_tools_of_a_call_open_on_demand(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.long, call=30)
    added = page.locator(".tools .chip")
    expect(added).to_have_count(0)
    page.get_by_text("Tools, as sent").click()
    expect(added).to_have_text("added by Tersely")
    page.locator(".tools summary", has_text="context_search").click()
    expect(page.get_by_label("Definition of context_search")).to_contain_text('"parameters"')
    assert violations(page) == []


def test_the_slider_and_the_strip_choose_a_call(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.long)
    page.locator("context-strip .bar[data-call='7'] .hit").dispatch_event("click")
    page.wait_for_url(re.compile("call=7"))
    expect(page.locator("output")).to_have_text(f"call 7 of {demo.calls}")
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_url(re.compile("call=8"))
    page.locator("main").focus()
    page.keyboard.press("]")
    page.wait_for_url(re.compile("call=9"))


def test_rows_come_as_they_are_scrolled_to(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.long, call=demo.calls)
    expect(page.locator(".row")).to_have_count(60)
    gaps = page.locator(".gap").count()
    assert gaps >= 1
    page.locator(".gap").last.scroll_into_view_if_needed()
    expect(page.locator(".gap")).to_have_count(gaps - 1, timeout=10_000)


def test_text_of_messages_is_text(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.hostile)
    line = page.locator(".row", has_text="alert(1)").first
    expect(line).to_contain_text("<script>alert(1)</script>")
    expect(line).to_contain_text("␛[31mred")
    assert page.locator(".row script, .row img").count() == 0
    page = watched.open("console/sessions")
    expect(page.get_by_role("link", name=HOSTILE[:25])).to_be_visible()
    page = watched.open("console/search", query="onerror")
    expect(page.locator(".hits")).to_contain_text("<img src=x")


def test_sessions_are_filtered_and_ordered_in_the_address(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/sessions")
    assert page.locator("tbody tr").count() == 3
    page.get_by_label("Client").fill("claude-code")
    page.get_by_label("Order").select_option("saved")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url(re.compile("client=claude-code.*sort=saved"))
    assert page.locator("tbody tr").count() == 1


def test_the_keyboard_alone_opens_a_session(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/sessions")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/console/session\?"))
    watched.open("console/sessions")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "query"


def test_a_pin_is_set_and_taken_away(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.other, seq=2)
    page.get_by_role("link", name="Pin message 2").click()
    expect(page.get_by_role("alert")).to_contain_text("The next context")
    page.get_by_role("button", name="Pin the message").click()
    expect(page.locator("#m2 .role").first).to_contain_text("pinned")
    page.get_by_role("link", name="Unpin message 2").click()
    page.get_by_role("button", name="Unpin the message").click()
    expect(page.locator("#m2 .role").first).not_to_contain_text("pinned")


def test_priority_is_set_after_a_preview_of_its_effect(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.other, seq=2)
    page.get_by_role("link", name="Priority of message 2").click()
    page.get_by_label("Priority").fill("80")
    page.get_by_role("button", name="See what changes").click()
    expect(page.get_by_role("alert")).to_contain_text("The next context")
    expect(page.get_by_role("alert")).to_contain_text("50 now")
    page.get_by_role("button", name="Set the priority to 80").click()
    expect(page.locator("#m2 .role").first).to_contain_text("priority 80")


def test_another_strategy_is_tried_and_kept(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session/try", id=demo.other)
    page.get_by_label("Strategy").select_option("full")
    expect(page.get_by_label("Instead")).to_contain_text("full, epoch")
    expect(page.locator(".confirm")).to_contain_text(
        re.compile(r"\d tokens (more|fewer) than now: \$[\d.]+ (more|less) read anew|As many tokens as now")
    )
    page.get_by_role("button", name="Make it the session's").click()
    expect(page.get_by_label("Now")).to_contain_text("full, epoch")
    page.get_by_label("Strategy").select_option("slim")
    page.get_by_label("recent turns").fill("99")
    page.get_by_label("New epochs").select_option("marks")
    page.get_by_label("High, tokens").fill("9000")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_label("Instead")).to_contain_text("recent_turns")
    page.get_by_label("recent turns").fill("2")
    page.get_by_label("Low, tokens").fill("3000")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_label("Instead")).to_contain_text("slim, epoch")


def test_turn_is_dropped_after_a_preview_of_its_effect(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session/hands", id=demo.other)
    page.get_by_role("link", name="Drop t1").click()
    expect(page.get_by_role("alert")).to_contain_text("messages")
    expect(page.get_by_role("alert")).to_contain_text("full now, left out then")
    page.get_by_role("button", name="Drop a turn").click()
    expect(page.locator("tr", has_text="t1").last).to_contain_text("dropped")


def test_state_and_scratchpad_are_edited(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session/memory", id=demo.long)
    page.get_by_label("State block").fill("Goal: <b>rows</b>")
    page.get_by_role("button", name="Save the state").click()
    expect(page.locator(".diff").first).to_contain_text("+ Goal: <b>rows</b>")
    page.get_by_label("Scratchpad").fill("milk")
    page.get_by_role("button", name="Save the scratchpad").click()
    expect(page.get_by_label("Scratchpad")).to_have_value("milk")


def test_live_page_shows_a_finished_call(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/live")
    expect(page.get_by_role("status")).to_have_text("connected")
    page.request.post(
        f"{demo.url}/v1/chat/completions",
        data={"model": "gpt-4o", "messages": [{"role": "user", "content": "Are you there?"}]},
    )
    expect(page.locator(".fresh", has_text="call 1").first).to_contain_text("gpt-4o", timeout=10_000)
    expect(page.locator(".fresh", has_text="epoch").first).to_contain_text(EPOCH_REASONS["first"], timeout=10_000)


def test_operations_of_the_api_are_described_and_tried(watched: Watched, demo: Demo) -> None:
    page = watched.open("docs")
    page.get_by_role("link", name="POST /api/sessions/{session_id}/search").click()
    expect(page.get_by_role("region", name="Members of the body")).to_contain_text("turnId")
    page.get_by_label("session_id (required)").fill(demo.hostile)
    page.locator("textarea").fill('{"mode": "search", "query": "alert(1)"}')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text("200 OK")
    answer = page.get_by_role("region", name="Answer", exact=True)
    expect(answer).to_contain_text("<script>alert(1)</script>")
    assert answer.locator("script").count() == 0
    page.get_by_label("session_id (required)").fill("no such/session")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text("404")
    assert violations(page) == []


def test_a_form_of_another_site_changes_nothing(watched: Watched, demo: Demo) -> None:
    """A page elsewhere that posts to the console is refused, with the visitor's cookie or without."""
    watched.open("console/sessions")
    action = f"{demo.url}/console/session/act"
    form = f'<form method="post" action="{action}"><input name="id" value="{demo.long}"><input name="act" value="undo">'

    def serve_page(route: Route) -> None:
        route.fulfill(body=f"{form}<button>Go</button></form>", content_type="text/html")

    watched.page.route("http://elsewhere.test/**", serve_page)
    watched.page.goto("http://elsewhere.test/")
    with watched.page.expect_response(lambda response: "/console/" in response.url) as got:
        watched.page.get_by_role("button").click()
    assert got.value.status == 403
    watched.troubles = [each for each in watched.troubles if "elsewhere.test" not in each]


def test_views_are_light(watched: Watched, demo: Demo) -> None:
    """No view loads more than 100 KB of the console's own files."""
    names = ["console.css", "console.js", "vendor/htmx.min.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"]
    for path, query in pages(demo):
        page = watched.open(path, **query)
        loaded = page.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
        used = {name for name in names if any(url.endswith(f"/static/{name}") for url in loaded)}
        assert "console.js" in used, path
        sizes = [page.request.get(f"{demo.url}/console/static/{name}").headers["content-length"] for name in used]
        assert sum(map(int, sizes)) < 100_000, path


def test_demo_is_played_from_the_first_page(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/replay")
    page.get_by_role("button", name="Play the demo").click()
    page.wait_for_url(re.compile(r"/console/replay/session\?id="), timeout=60_000)
    expect(page.locator("output")).to_have_text("call 87 of 87")
    assert page.locator("context-strip .cut").count() >= 1
    assert violations(page) == []
    for tab, heading in (
        ("Cache", "Why the cache broke"),
        ("Savings", "What each call cost"),
        ("Try", "other settings"),
    ):
        page.get_by_role("navigation", name="Session").get_by_role("link", name=tab).click()
        expect(page.get_by_role("heading", name=re.compile(heading))).to_be_visible()
    page.get_by_role("navigation", name="Session").get_by_role("link", name="Context").click()
    # The key belongs to the page that is there: wait for the new one and its script.
    page.wait_for_url(re.compile(r"/console/replay/session\?id="))
    page.keyboard.press("[")
    page.wait_for_url(re.compile("/console/replay/session.*call=86"))
    page.get_by_role("link", name="Replay").first.click()
    page.get_by_role("button", name="Delete The nightly import").first.click()
    expect(page.get_by_role("heading", name="Replays")).to_be_visible()


def test_dropped_file_is_played_or_its_error_is_shown(watched: Watched, demo: Demo, tmp_path: Path) -> None:
    page = watched.open("console/replay")
    good = tmp_path / "mine.jsonl"
    messages = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    good.write_text(json.dumps({"messages": messages}))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("<b>nothing</b>")
    page.get_by_label("Session file").set_input_files(bad)
    page.get_by_role("button", name="Play it").click()
    expect(page.locator("[data-play] [role=status]")).to_contain_text("not a transcript", timeout=20_000)
    page.evaluate(
        """text => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([text], "mine.jsonl"));
            const event = new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true});
            document.querySelector("[data-play]").dispatchEvent(event);
        }""",
        good.read_text(),
    )
    page.get_by_label("Strategy").select_option("window")
    page.get_by_role("button", name="Play it").click()
    page.wait_for_url(re.compile(r"/console/replay/session\?id="), timeout=60_000)
    expect(page.locator("output")).to_have_text("call 3 of 3")
    expect(page.locator(".said", has_text="user 2")).to_be_visible()


def test_rows_far_away_are_put_away_and_come_back(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.long, call=demo.calls)
    page.set_viewport_size({"width": 900, "height": 70})
    page.locator(".gap").last.scroll_into_view_if_needed()
    page.locator(".chunk").last.locator(".row").last.scroll_into_view_if_needed()
    page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
    expect(page.locator("#m2")).to_have_count(0, timeout=10_000)
    page.locator(".gap").first.scroll_into_view_if_needed()
    expect(page.locator("#m2")).to_have_count(1, timeout=10_000)


def test_clipped_text_is_shown_whole(watched: Watched, demo: Demo) -> None:
    words = "".join(f"word {n} " for n in range(2_000))
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": words}]}
    watched.page.request.post(f"{demo.url}/v1/chat/completions", data=body, headers={"x-tersely-session": "clipped"})
    page = watched.open("console/session", id="clipped")
    row = page.locator(".row", has_text="word 1 word 2").first
    expect(row).not_to_contain_text("word 1999")
    row.get_by_role("button", name=re.compile("Show all")).first.click()
    expect(row).to_contain_text("word 1999")


def test_memos_are_made_changed_and_deleted(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/memory")
    page.get_by_text("New memo").click()
    page.get_by_label("Content").first.fill("Ship <b>on</b> Friday")
    page.get_by_label("Tags, with spaces between").fill("release")
    page.get_by_role("button", name="Save the memo").first.click()
    memo = page.locator(".memo", has_text="Ship <b>on</b> Friday")
    expect(memo).to_contain_text("release")
    memo.get_by_text("Edit").click()
    memo.get_by_label("Content").fill("Ship on Monday")
    memo.get_by_label("Tags").fill("release, plan")
    memo.get_by_role("button", name="Save the memo").click()
    memo = page.locator(".memo", has_text="Ship on Monday")
    expect(memo).to_contain_text("plan")
    memo.get_by_role("button", name="Delete").click()
    expect(page.locator(".memo", has_text="Ship on Monday")).to_have_count(0)


def test_search_of_a_session_opens_a_hit_at_its_call(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/session", id=demo.long)
    page.keyboard.press("/")
    page.keyboard.type("nightly import drops")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/console/search"))
    hit = page.locator(".hits li", has_text="nightly import drops").first
    expect(hit.locator(".near").first).to_be_visible()
    expect(hit.locator(".near mark")).to_have_count(0)
    page.get_by_role("link", name=re.compile("Open at call 1 ?,")).first.click()
    expect(page.locator(".row.target")).to_contain_text("nightly import drops")
    expect(page.locator("output")).to_have_text(f"call 1 of {demo.calls}")


def test_subagents_are_folded_under_their_parent(watched: Watched, demo: Demo) -> None:
    watched.page.request.post(f"{demo.url}/api/sessions", data={"id": "helper", "parent": demo.other})
    page = watched.open("console/sessions")
    expect(page.get_by_role("row", name="helper")).to_have_count(0)
    chip = page.get_by_role("button", name="1 subagent")
    chip.click()
    expect(page.locator("tr.under")).to_contain_text("helper")
    chip.click()
    expect(page.locator("tr.under")).to_be_hidden()


def test_artifact_is_shown_as_text(watched: Watched, demo: Demo) -> None:
    output = "<i>line</i>\n" * 6_000
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": output},
    ]
    watched.page.request.post(
        f"{demo.url}/v1/chat/completions",
        data={"model": "gpt-4o", "messages": messages},
        headers={"x-tersely-session": "spilled"},
    )
    page = watched.open("console/session/memory", id="spilled")
    page.locator(".plain a.mono").first.click()
    expect(page.get_by_role("region", name="Tool output")).to_contain_text("<i>line</i>")
    assert page.locator("pre i").count() == 0
    page.get_by_role("link", name="Delete…").click()
    expect(page.get_by_role("alert")).to_contain_text("deleted for good")
    page.get_by_role("button", name="Delete the output").click()
    expect(page.get_by_text("No tool output was large enough")).to_be_visible()


def test_live_shows_states_and_refusals(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/live")
    expect(page.get_by_role("status")).to_have_text("connected")
    url = f"{demo.url}/v1/chat/completions"
    refused = page.request.post(url, data={"messages": []}, headers={"x-tersely-strategy": "nonsense"})
    assert refused.status >= 400
    expect(page.locator("[data-notes]")).to_contain_text("refused", timeout=10_000)
    script, demo.upstream.state.script = demo.upstream.state.script, None
    demo.upstream.state.first_delay = 4.0
    body = {"model": "slow", "stream": True, "messages": [{"role": "user", "content": "Slowly, please."}]}
    with ThreadPoolExecutor(max_workers=1) as thread:
        call = thread.submit(httpx.post, url, json=body, timeout=60)
        expect(page.locator("[data-running]")).to_contain_text("waiting", timeout=10_000)
        assert call.result().status_code == 200
    demo.upstream.state.first_delay, demo.upstream.state.script = 0.0, script
    expect(page.locator("[data-none]")).to_be_visible(timeout=10_000)


def test_operator_makes_limits_and_revokes(watched: Watched, demo: Demo) -> None:
    page = watched.open("console/operator")
    expect(page.get_by_role("heading", name="Database")).to_be_visible()
    page.get_by_text("New tenant").click()
    page.get_by_label("Name").last.fill("acme")
    page.get_by_role("button", name="Make the tenant").click()
    acme = page.locator("article.tenant", has=page.get_by_role("heading", name="acme"))
    acme.locator("summary", has_text="New key").click()
    acme.get_by_label("Name").fill("laptop")
    acme.get_by_role("button", name="Make the key").click()
    expect(page.get_by_role("alert")).to_contain_text("tsk_")
    acme.locator("summary", has_text="Limits").click()
    acme.get_by_label("Requests per minute").fill("60")
    acme.get_by_role("button", name="Save the limits").click()
    expect(acme).to_contain_text("of 60")
    acme.get_by_role("button", name="Revoke").click()
    expect(acme).to_contain_text("revoked")
