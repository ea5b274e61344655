"""A real Prometheus in front of a service under load: every panel and every alert finds data.

Debian's ``prometheus`` package has ``prometheus`` and ``promtool``; without them these tests are skipped.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.loops import wait_until
from tests.support.relay import relay
from tests.support.services import many, serve
from tests.support.upstreams import Model, scripted

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
# What stands in for Grafana's own variables.
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$job": "tersely"}

# What the load counts at the least, where a panel would also show series that stay 0.
COUNTED = {
    'tersely_host_calls_total{host="",outcome="answered"}': 59,
    'tersely_host_calls_total{host="away",outcome="upstream_error"}': 1,
    'tersely_host_calls_total{outcome="refused"}': 2,
    'tersely_shadow_calls_total{result="judged"}': 1,
}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def test_alerts_are_valid_and_their_unit_tests_pass():
    promtool = program("promtool")
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")):
        done = subprocess.run(
            [promtool, *arguments], cwd=ALERTS.parent, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_configuration_is_valid_and_loads_the_alerts():
    promtool = program("promtool")
    file = ALERTS.parent / "prometheus.yml"
    done = subprocess.run([promtool, "check", "config", file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert yaml.safe_load(file.read_text())["rule_files"] == ["alerts.yml"]


def test_every_alert_has_a_unit_test():
    rules = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    tests = yaml.safe_load((ALERTS.parent / "alerts.test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == set(rules)


class Prometheus:
    """A running Prometheus at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        found = answer.json()
        assert found["status"] == "success", (parameters, found)
        return found["data"]

    def values(self, expression: str) -> list[float]:
        """The numbers that an expression gives now."""
        return [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]

    def scrapes(self) -> int:
        """Return the number of successful scrapes of the service."""
        return int(sum(self.values('sum(count_over_time(up{job="tersely"}[1h]))')))


@contextlib.contextmanager
def prometheus(targets: Sequence[str], directory: Path) -> Iterator[Prometheus]:
    """Prometheus with the project's own configuration, which looks every second at ``targets``."""
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del config["scrape_configs"][0]["dns_sd_configs"]  # a name of a network of containers
    (directory / "replicas.yml").write_text(yaml.safe_dump([{"targets": list(targets)}]))
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(ALERTS, directory)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [
        program("prometheus"),
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{running.url}/-/ready", timeout=1).status_code == 200
            return False

        wait_until(is_ready, 30)
        yield running
    finally:
        process.terminate()
        process.wait(20)


def load(url: str, model: Model) -> None:
    """Calls of every kind that a panel shows."""
    with httpx.Client(base_url=url, timeout=30) as http:

        def chat(key: str, history: list[dict[str, Any]], **headers: str) -> httpx.Response:
            answer = http.post(
                "/v1/chat/completions",
                json={"model": "gpt-4o-mini", "messages": history, "user": key},
                headers={"x-tersely-session": key, "x-tersely-epoch": "every_request", **headers},
            )
            if answer.status_code == 200:
                history.append(answer.json()["choices"][0]["message"])
            return answer

        usage = {
            "prompt_tokens": 900,
            "completion_tokens": 20,
            "total_tokens": 920,
            "prompt_tokens_details": {"cached_tokens": 300},
        }
        for strategy in ("slim", "tiered", "window", "compact"):
            history: list[dict[str, Any]] = []
            for number in range(14):
                history.append({"role": "user", "content": f"Question {number} " + "about the palette " * 120})
                model.script(strategy, ScriptedReply(usage=usage))
                assert chat(strategy, history, **{"x-tersely-strategy": strategy}).status_code == 200
            http.post(f"/api/sessions/{strategy}/compact").raise_for_status()
            http.post(f"/api/sessions/{strategy}/messages/1/pin").raise_for_status()
            for lookup in (
                {"mode": "search", "query": "palette"},
                {"mode": "tail"},
                {"mode": "relevant", "query": "it"},
            ):
                http.post(f"/api/sessions/{strategy}/search", json=lookup)
            sql = {"sql": "SELECT count(*) FROM messages"}
            http.post(f"/api/sessions/{strategy}/query", json=sql).raise_for_status()
        chat("window", [{"role": "user", "content": "call manage_scratchpad"}], **{"x-tersely-strategy": "window"})
        title = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
        chat("title", [title, {"role": "user", "content": "hello"}])
        assert chat("trial", [{"role": "user", "content": "hello"}]).status_code == 200
        away = {"model": "away", "messages": [{"role": "user", "content": "hello"}]}
        assert http.post("/v1/chat/completions", json=away).status_code == 502
        for body in (b"{", b'{"model": "m", "messages": 7}'):
            http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})


def has_number(values: list[float]) -> bool:
    return any(not isnan(value) for value in values)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_panel_and_every_alert_finds_data(database: Database, tmp_path: Path):
    program("prometheus")
    upstreams = {"away": {"dialect": "openai", "base_url": "http://127.0.0.1:9", "models": ["away"]}}
    with (
        many(relay(database)) as (way,),
        scripted() as model,
        serve(database, model.url, dsn=way.dsn, chat_commands="on", shadow="window", upstreams=upstreams) as service,
        prometheus([f"127.0.0.1:{service.port}"], tmp_path) as watcher,
    ):
        wait_until(lambda: watcher.scrapes() >= 2, 30)
        load(service.url, model)
        before = watcher.scrapes()
        wait_until(lambda: watcher.scrapes() >= before + 3, 30)
        dashboard = json.loads((DEPLOY / "grafana/dashboards/tersely.json").read_text())
        empty = {}
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                assert "$" not in expression
                if not has_number(watcher.values(expression)):
                    empty[f"{panel['title']}: {expression}"] = watcher.values(expression)
        assert not empty
        for series, least in COUNTED.items():
            assert sum(watcher.values(series)) >= least, series

        rules = watcher.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        for rule in rules:
            for operand in re.split(r"\s+and\s+", rule["query"]):
                compared = re.match(r"(?s)(.*?)\s(==|>|<)\s([\d.]+)\Z", operand.strip())
                assert compared is not None, operand
                measured = compared[1]
                assert has_number(watcher.values(measured)), f"{rule['name']}: {measured}"

        way.cut()
        for number in range(3):
            body = {"model": "m", "messages": [{"role": "user", "content": f"without a database {number}"}]}
            assert httpx.post(f"{service.base_url}/chat/completions", json=body, timeout=30).status_code == 200
        wait_until(
            lambda: any(
                alert["labels"]["alertname"] == "TerselyFailOpen" and alert["state"] == "firing"
                for alert in watcher.ask("alerts")["alerts"]
            ),
            30,
        )
        way.restore()
        time.sleep(0.5)
