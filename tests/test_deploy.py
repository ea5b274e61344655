"""The deployment files agree with the code: what they watch exists, and what they start is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from app.service.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]

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


def exported() -> dict[str, set[str]]:
    """Every series name that the service exports, with its labels."""
    series: dict[str, set[str]] = {}
    for metric in vars(Metrics()).values():
        for family in metric.collect() if hasattr(metric, "collect") else ():
            labels = set(getattr(metric, "_labelnames", ()))
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            series |= {family.name + suffix: labels for suffix in suffixes}
    return series


def shown() -> list[str]:
    """The expressions of the dashboard."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/tersely.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_shows_each_promised_metric_and_none_that_does_not_exist():
    named = {name for expression in shown() for name in re.findall(r"tersely_\w+", expression)}
    assert named <= exported().keys()
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} == PROMISED


def test_the_dashboard_groups_by_labels_that_the_metrics_have():
    series = exported()
    for expression in shown():
        metrics = re.findall(r"tersely_\w+", expression)
        for group in re.findall(r"by \(([^)]*)\)", expression):
            wanted = {label.strip() for label in group.split(",")} - {"le"}
            assert all(wanted <= series[name] for name in metrics), expression


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
    scraped = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["tersely:8484"]
    assert "tersely" in compose["services"]


def test_the_image_copies_only_what_the_builder_is_sent():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set(re.findall(r"^COPY (?!--from)(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)
