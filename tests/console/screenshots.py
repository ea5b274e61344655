"""Take the pictures of README and docs from the demonstration: ``make screenshots``."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

from tests.conftest import TERSELY
from tests.console.conftest import CHROMIUM
from tests.support.demo import TASKS, CachingModel, play
from tests.support.upstreams import scripted

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@contextmanager
def service(upstream: str) -> Iterator[str]:
    """A service of its own, with a database of its own."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # Postgres runs as another user where this one is root
        environment = {
            **os.environ,
            "TERSELY_DATA_DIR": directory,
            "TERSELY_OPENAI_BASE_URL": upstream,
            "TERSELY_LOG_LEVEL": "error",
            "TERSELY_EPOCH": '{"high": 16000, "low": 6000}',
        }
        command = [TERSELY, "serve", "--port", "0"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.terminate()
            process.wait(60)


async def fill(url: str) -> None:
    """Play the demonstration."""
    await play(url, TASKS[:3], model="claude-sonnet-4-5", agent="claude-cli/2.1")
    await play(url, TASKS[3:5], model="gpt-5-mini", agent="codex_cli_rs/0.169")
    await play(url, TASKS[1:6], model="my-local-model", agent="aider/0.86")
    await play(url, TASKS * 4, lines=70, X_Session_Id="nightly-import")


def main() -> None:
    """Write the pictures, light and dark."""
    model = CachingModel()
    with scripted() as upstream, service(upstream.url) as url:
        upstream.state.script = model.script
        with ThreadPoolExecutor(max_workers=1) as thread:
            thread.submit(asyncio.run, fill(url)).result()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(f"{url}/console/replay")
            page.get_by_role("button", name="Play the demo").click()
            page.wait_for_url("**/console/replay/session?id=*", timeout=60_000)
            demo = page.url
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                for name, path, query in (
                    ("sessions", "sessions", {}),
                    ("session", "session", {"id": "nightly-import", "call": "60"}),
                    ("cache", "session/cache", {"id": "nightly-import"}),
                    ("savings", "savings", {"by": "client"}),
                    ("try", "session/try", {"id": "nightly-import", "name": "window", "policy": "auto"}),
                    ("operator", "operator", {}),
                    ("live", "live", {}),
                    ("replay", "replay", {}),
                ):
                    page.goto(f"{url}/console/{path}?{urlencode(query)}")
                    page.wait_for_timeout(400)
                    page.screenshot(path=PICTURES / f"{name}-{scheme}.png")
                page.goto(f"{demo}&call=70")
                page.wait_for_timeout(400)
                page.screenshot(path=PICTURES / f"demo-{scheme}.png")
            browser.close()


if __name__ == "__main__":
    main()
