"""The deployment files agree with the code: what they watch exists, and what they start is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml
from dotenv import dotenv_values

from tersely.service.common.metrics import Metrics
from tersely.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]

# The metrics that outsiders may rely on.
PROMISED = {
    "tersely_requests_total",
    "tersely_overhead_seconds",
    "tersely_upstream_seconds",
    "tersely_upstream_first_byte_seconds",
    "tersely_in_flight_requests",
    "tersely_context_tokens",
    "tersely_tokens_saved_total",
    "tersely_upstream_tokens_total",
    "tersely_epochs_total",
    "tersely_compactions_total",
    "tersely_compaction_seconds",
    "tersely_compression_ratio",
    "tersely_pairing_repairs_total",
    "tersely_token_estimate_error_ratio",
    "tersely_fail_open_total",
    "tersely_search_seconds",
    "tersely_db_pool_connections",
    "tersely_queries_total",
    "tersely_query_seconds",
    "tersely_level_tokens",
    "tersely_level_messages",
}


# Labels that Prometheus adds to a series, and that of a histogram's buckets.
SCRAPED = {"le", "instance", "job"}


def exported() -> dict[str, set[str]]:
    """Every series name that the service exports, with its labels."""
    series: dict[str, set[str]] = {}
    for family in Metrics(data_dir=ROOT).registry.collect():
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels.keys() - {"le"})
    return series


def shown() -> list[str]:
    """The expressions of the dashboard."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/tersely.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def without_suffix(series: str) -> str:
    """The name of the metric that a series belongs to."""
    return re.sub(r"_(bucket|sum|count)$", "", series)


def test_the_dashboard_shows_every_metric_and_none_that_does_not_exist():
    named = {name for expression in shown() for name in re.findall(r"(?:tersely|process)_\w+", expression)}
    assert named <= exported().keys()
    ours = {without_suffix(name) for name in exported() if name.startswith("tersely_")}
    assert {without_suffix(name) for name in named} >= ours >= PROMISED


def test_the_dashboard_groups_by_labels_that_the_metrics_have():
    series = exported()
    for expression in shown():
        metrics = re.findall(r"tersely_\w+", expression)
        for group in re.findall(r"by \(([^)]*)\)", expression):
            wanted = {label.strip() for label in group.split(",")} - SCRAPED
            assert all(wanted <= series[name] for name in metrics), expression


def test_every_panel_asks_the_chosen_source_about_the_chosen_instances():
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/tersely.json").read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            selectors = re.findall(r"(?:tersely|process)_\w+(\{[^}]*\})?", target["expr"])
            assert all('job=~"$job"' in each and 'instance=~"$instance"' in each for each in selectors), target["expr"]


def test_labelled_metrics_exist_from_the_start():
    metrics = Metrics()
    labelled = {name: metric for name, metric in vars(metrics).items() if hasattr(metric, "_metrics")}
    assert len(labelled) > 15
    for name, metric in labelled.items():
        assert metric._metrics, f"{name} has no child: its first event would be missed"
    assert not [name for name in exported() if name.endswith("_created")]


def test_panels_of_the_dashboard_do_not_overlap():
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/tersely.json").read_text())
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_compose_mounts_only_files_that_exist_and_publishes_on_loopback_only():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert "healthcheck" in service or "build" in service
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["dns_sd_configs"] == [{"names": ["tersely"], "type": "A", "port": 8484}]
    assert "tersely" in compose["services"]


def test_compose_hands_every_setting_on():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    given = {line.partition("=")[0] for line in compose["services"]["tersely"]["environment"]}
    given = {name for name in given if not name.startswith("OTEL_")}
    # The image says where the data directory is.
    assert given == {
        PREFIX + name.upper() for name in Settings.model_fields if name not in ("database_url", "data_dir")
    } | {"DATABASE_URL"}


# A value of its own for each setting that is no number and no choice.
TEXTS = {
    "upstreams": '{"azure": {"dialect": "azure", "base_url": "https://x.openai.azure.com"}}',
    "limits": '{"requests_per_minute": 60}',
    "strategy": '{"name": "slim", "recent_turns": 3}',
    "epoch": "every_request",
    "tools": "off",
    "live_sessions": "128",
    "prices": "/etc/tersely/prices.json",
    "cors_origins": "https://app.example.com",
    "passthrough": "GET /v1/files/{id}",
    "insecure": "1",
}


def other_value(name: str) -> str:
    """A value of a setting that is not its default."""
    field = Settings.model_fields[name]
    choices = get_args(field.annotation)
    if name in TEXTS:
        return TEXTS[name]
    if choices and isinstance(choices[0], str):
        return str(next(choice for choice in choices if choice != field.default))
    kinds = choices or (field.annotation,)
    if int in kinds or float in kinds:
        return str((field.default or 1) + 1)
    return "https://host.example/v1" if name.endswith("_url") else f"a-value-of-{name}"


def substituted(text: str, variables: dict[str, str]) -> str:
    """A compose file with its variables put in, as compose does it: ``${NAME}`` and ``${NAME:-default}``."""
    found = r"\$\{(?P<name>[A-Z_]+)(?::-(?P<default>[^}]*))?\}"
    return re.sub(found, lambda match: variables.get(match["name"]) or match["default"] or "", text)


def test_compose_takes_every_setting_from_an_environment_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    names = sorted(Settings.model_fields.keys() - {"database_url", "data_dir"})
    file = tmp_path / ".env"
    file.write_text("".join(f"{PREFIX}{name.upper()}='{other_value(name)}'\n" for name in names))
    given = {name: value for name, value in dotenv_values(file, interpolate=False).items() if value is not None}
    compose = yaml.safe_load(substituted((ROOT / "docker-compose.yml").read_text(), given))
    for name in [name for name in os.environ if name.startswith((PREFIX, "DATABASE_URL"))]:
        monkeypatch.delenv(name)
    for line in compose["services"]["tersely"]["environment"]:
        name, has_value, value = line.partition("=")
        if has_value or name in given:
            monkeypatch.setenv(name, value if has_value else given[name])
    read, defaults = Settings(_env_file=None), Settings.model_construct()
    assert [name for name in names if getattr(read, name) == getattr(defaults, name)] == []
    assert read.database_url is not None
    assert "@postgres:" in read.database_url.get_secret_value()


def test_every_image_is_pinned_by_digest():
    compose = re.findall(r"\$\{[A-Z]+_IMAGE:-([^}]+)\}", (ROOT / "docker-compose.yml").read_text())
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert base[1] in compose
    assert len(compose) == 4
    for image in compose:
        assert re.fullmatch(r"[a-z/]+:v?[\d.]+(-[a-z-]+)?@sha256:[0-9a-f]{64}", image), image


def test_every_image_can_be_replaced():
    pinned = "registry.example/it@sha256:" + "a" * 64
    text = (ROOT / "docker-compose.yml").read_text()
    variables = set(re.findall(r"\$\{([A-Z]+_IMAGE):-", text))
    compose = yaml.safe_load(substituted(text, dict.fromkeys(variables, pinned)))
    own = compose["services"].pop("tersely")
    assert {service["image"] for service in compose["services"].values()} == {pinned}
    assert own["build"]["args"]["PYTHON_IMAGE"] == pinned
    bases = re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(bases) == {"${PYTHON_IMAGE}"}
    page = (ROOT / "docs/deploy.md").read_text()
    assert all(f"`{name}`" in page for name in variables)


def test_image_copies_only_files_of_the_build_context():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set(re.findall(r"^COPY (?!--from)(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_systemd_unit_is_understood():
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = ROOT / "deploy/systemd/tersely.service"
    done = subprocess.run([program, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if "tersely.service" in line]
    assert [line for line in complaints if "/opt/tersely/bin/tersely is not executable" not in line] == []


def test_pin_images_writes_a_line_for_each_image_of_the_compose_file(tmp_path: Path):
    """With a `docker` that knows the digest of every image."""
    digest = "sha256:" + "a" * 64
    fake = tmp_path / "docker"
    fake.write_text(f'#!/bin/sh\ntest "$1 $2 $3" = "buildx imagetools inspect" && echo {digest}\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "-s", "--no-print-directory", "pin-images"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines())
    compose = (ROOT / "docker-compose.yml").read_text()
    assert lines.keys() == set(re.findall(r"\$\{(\w+_IMAGE):-", compose))
    for name, image in lines.items():
        assert image.endswith(f"@{digest}")
        assert f"{name}:-{image.partition('@')[0]}@" in compose
    fake.write_text("#!/bin/sh\nexit 1\n")
    failed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert failed.returncode != 0
