"""deploy/helm/kvpool: linted, rendered for every set of values, and checked against the schemas of Kubernetes.

`make test SUITE=helm` runs this file; `make test` does not: it needs Helm as a Python package, and the schemas. No cluster has
seen the chart. Objects of Prometheus Operator and KEDA have no schema here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import helm_python
import kubernetes_validate
import pytest
import yaml

from kvpool.cache_service.request_sizes import SERVICE as CACHE_SERVICE
from kvpool.cache_service.settings import ManagerSettings
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.settings import ProcessSettings, load_settings
from kvpool.worker_service.servicer import SERVICE as WORKER_SERVICE
from kvpool.worker_service.settings import WorkerSettings
from tests.deploy.expressions import alerts, metrics_in
from tests.docs.blocks import ROOT
from tests.docs.test_metrics_document import listed

CHART: Final = ROOT / "deploy" / "helm" / "kvpool"
VERSIONS: Final = ("1.27", "1.30", "1.33", "1.36")
WITHOUT_SCHEMA: Final = {"PodMonitor", "ScaledObject"}
VALUES: Final[dict[str, dict[str, Any]]] = {
    "defaults": {},
    "one manager": {"manager": {"replicas": 1}, "gateway": {"replicas": 1}},
    "GPUs and claims": {
        "worker": {
            "model": "/models/llama",
            "device": "cuda",
            "gpus": 1,
            "kvCacheMemory": "",
            "threads": 0,
            "models": {"claim": "models"},
            "cache": {"claim": "cache"},
            "flags": {"max-num-seqs": 128, "dtype": "bfloat16"},
            "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "annotations": {"a": "b"},
        },
    },
    "a gateway for others": {
        "fullnameOverride": "pool",
        "image": {"pullSecrets": ["registry"]},
        "gateway": {
            "keysSecret": "keys",
            "ingress": {"enabled": True, "className": "nginx", "host": "llm.example", "tlsSecret": "tls", "annotations": {}},
            "flags": {"max-streams": 10},
            "nodeSelector": {"a": "b"},
        },
        "networkPolicy": {
            "clients": [{"podSelector": {"matchLabels": {"app": "mine"}}}],
            "monitoring": [],
            "callers": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        },
    },
    "nobody may call": {"networkPolicy": {"callers": []}},
    "no gateway, no policies": {"gateway": {"enabled": False}, "networkPolicy": {"enabled": False}},
    "operators": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "keda": {"enabled": True},
        "manager": {"flags": {"max-total-blocks": 1000}, "tolerations": [{"key": "a", "operator": "Exists"}]},
    },
}  # fmt: skip
SETTINGS: Final[dict[str, type[ProcessSettings]]] = {
    "manager": ManagerSettings,
    "worker": WorkerSettings,
    "gateway": GatewaySettings,
}
each_set = pytest.mark.parametrize("name", VALUES)


@cache
def _rendered(name: str) -> tuple[dict[str, Any], ...]:
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(VALUES[name], name="demo", namespace="prod")
    texts = [text for file, text in files.items() if file.endswith(".yaml")]
    return tuple(found for text in texts for found in yaml.safe_load_all(text) if found)


def objects(name: str, kind: str = "") -> dict[str, dict[str, Any]]:
    """Those of a set of values, by their names without the prefix; of one kind."""
    found = [one for one in _rendered(name) if kind in ("", one["kind"])]
    return {one["metadata"]["name"].rpartition("-")[2]: copy.deepcopy(one) for one in found}


def containers(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Component, pod and container of each Deployment."""
    for component, deployment in objects(name, "Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield component, pod, container


def flags(container: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for argument in container["args"]:
        flag, _, value = argument.partition("=")
        found.setdefault(flag, []).append(value)
    return found


@each_set
def test_helm_finds_no_mistake(name: str) -> None:
    found = helm_python.lint(str(CHART), VALUES[name], strict=True)
    assert not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@each_set
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_takes(name: str, version: str) -> None:
    for found in _rendered(name):
        if found["kind"] in WITHOUT_SCHEMA:
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                kubernetes_validate.validate(found, version, strict=True)
        else:
            kubernetes_validate.validate(found, version, strict=True)


def test_a_misspelt_field_of_an_object_is_found() -> None:
    (_, manager), *_ = [one for one in objects("defaults", "Deployment").items() if one[0] == "manager"]
    (container,) = manager["spec"]["template"]["spec"]["containers"]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manager, VERSIONS[0], strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"worker": {"modle": "x"}},
        {"manager": {"replicas": 0}},
        {"worker": {"flags": {"--max-num-seqs": 1}}},
        {"gateway": {"service": {"type": "Cluster"}}},
        {"networkpolicy": {"enabled": False}},
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any]) -> None:
    with helm_python.Chart.load(str(CHART)) as chart, pytest.raises(helm_python.HelmValuesError):
        chart.render(values, name="demo", namespace="prod")


def test_an_ingress_without_a_host_is_refused() -> None:
    values = {"gateway": {"ingress": {"enabled": True}}}
    with helm_python.Chart.load(str(CHART)) as chart, pytest.raises(helm_python.HelmError, match=r"ingress\.host"):
        chart.render(values, name="demo", namespace="prod")


@each_set
def test_the_processes_take_their_flags(name: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-long-secret")
    there = {"$(POD_IP)": "10.0.0.9", "$(POD_NAME)": "w-1", "/keys/keys": str(keys)}
    for component, _, container in containers(name):
        arguments = [re.sub("|".join(map(re.escape, there)), lambda one: there[one[0]], a) for a in container["args"]]
        settings = load_settings(SETTINGS[component], arguments)
        assert {flag[2:].replace("-", "_") for flag in flags(container)} <= set(type(settings).model_fields)
    names = {one["name"] for _, _, container in containers(name) for one in container.get("env", ())}
    assert names <= {"POD_NAME", "POD_IP", "OMP_NUM_THREADS", "HF_TOKEN"}


@each_set
def test_workers_and_gateway_look_for_the_leader_among_all_managers(name: str) -> None:
    """By a name that all of them have; it must not have an address of its own, behind which one is chosen."""
    service = objects(name, "Service")["manager"]
    assert service["spec"]["clusterIP"] == "None"
    manager = objects(name, "Deployment")["manager"]
    assert service["spec"]["selector"] == manager["spec"]["selector"]["matchLabels"]
    (port,) = service["spec"]["ports"]
    for component, _, container in containers(name):
        if component != "manager":
            assert flags(container)["--manager"] == [f"{service['metadata']['name']}.prod.svc:{port['port']}"]
    assert CACHE_SERVICE == "kvpool.v1.CacheService"  # whose health says who leads


@each_set
def test_the_lease_is_the_one_that_the_managers_may_write(name: str) -> None:
    (of_manager,) = [one for one in containers(name) if one[0] == "manager"]
    (election,) = flags(of_manager[2])["--election"]
    role, binding = objects(name, "Role")["manager"], objects(name, "RoleBinding")["manager"]
    create, use = role["rules"]
    assert create["verbs"] == ["create"]
    assert "resourceNames" not in create
    assert election == f"kubernetes:prod/{use['resourceNames'][0]}"
    assert use["verbs"] == ["get", "update", "watch"]
    assert binding["subjects"][0]["name"] == of_manager[1]["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    for component, pod, _ in containers(name):
        assert component == "manager" or pod["automountServiceAccountToken"] is False


@each_set
def test_probes_ask_for_what_they_mean(name: str) -> None:
    """A manager that stands by is ready; a worker without a session is not, and is not killed for it."""
    for component, _, container in containers(name):
        ready, live = container["readinessProbe"], container["livenessProbe"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if component == "manager":
            assert ready["grpc"] == live["grpc"] == {"port": ports["grpc"]}
        elif component == "worker":
            assert ready["grpc"] == {"port": ports["grpc"], "service": WORKER_SERVICE}
            assert live["tcpSocket"] == container["startupProbe"]["tcpSocket"] == {"port": "grpc"}
        else:
            assert ready["httpGet"] == live["httpGet"] == {"path": "/version", "port": "http"}
        assert ports.get("grpc", ports.get("http")) == int(flags(container)["--port"][0])
        assert ports.get("metrics") == (int(flags(container)["--metrics-port"][0]) if "metrics" in ports else None)


@each_set
def test_a_pod_has_time_to_drain(name: str) -> None:
    for component, pod, container in containers(name):
        grace = flags(container).get("--grace-seconds", ["0"])
        assert pod["terminationGracePeriodSeconds"] >= float(grace[0]) + 10, component
        assert "lifecycle" not in container


@each_set
def test_disruptions_take_one_at_a_time_and_never_the_only_one(name: str) -> None:
    budgets = objects(name, "PodDisruptionBudget")
    for component, deployment in objects(name, "Deployment").items():
        if deployment["spec"].get("replicas") == 1:
            assert component not in budgets, "it would hold up every drain of its node"
            continue
        assert budgets[component]["spec"]["maxUnavailable"] == 1
        assert budgets[component]["spec"]["selector"] == deployment["spec"]["selector"]


@each_set
def test_nothing_runs_as_root_or_writes_to_its_image(name: str) -> None:
    for _, pod, container in containers(name):
        assert pod["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        assert "/tmp" in mounts
    dockerfile = (ROOT / "Dockerfile").read_text()
    (worker,) = [container for component, _, container in containers(name) if component == "worker"]
    for written in re.findall(r"(?:KVPOOL_CACHE_DIR|XDG_STATE_HOME)=(\S+)", dockerfile):
        assert any(mount["mountPath"].startswith(written) for mount in worker["volumeMounts"]), written
    assert "useradd --uid 10001" in dockerfile


def test_the_images_are_those_that_compose_builds() -> None:
    text = (ROOT / "docker-compose.yml").read_text().replace("${KVPOOL_TAG:-local}", "local")
    services = yaml.safe_load(text)["services"]
    images = {component: container["image"] for component, _, container in containers("defaults")}
    built = {"manager": "manager", "worker": "worker-0", "gateway": "gateway"}
    assert images == {component: services[service]["image"] for component, service in built.items()}


def test_the_ports_of_the_cluster_are_closed_to_others() -> None:
    for name in VALUES:
        policies = objects(name, "NetworkPolicy")
        if "no policies" in name:
            assert not policies
            continue
        values = VALUES[name].get("networkPolicy", {})
        for component in ("manager", "worker"):
            spec = policies[component]["spec"]
            deployment = objects(name, "Deployment")[component]["spec"]
            assert spec["podSelector"] == deployment["selector"]
            (container,) = deployment["template"]["spec"]["containers"]
            ports = {one["name"]: one["containerPort"] for one in container["ports"]}
            calls, *metrics = spec["ingress"]
            assert calls["ports"] == [{"port": ports["grpc"]}]
            own, *others = calls["from"]
            assert own["podSelector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()
            assert others == values.get("clients", [])
            readers = [] if values.get("monitoring") == [] else [[{"port": ports["metrics"]}]]
            assert [one["ports"] for one in metrics] == readers
        assert bool(policies["gateway"]["spec"]["ingress"]) == (values.get("callers") != [])


def test_keda_decides_how_many_workers_there_are() -> None:
    for name in VALUES:
        has_replicas = "replicas" in objects(name, "Deployment")["worker"]["spec"]
        assert has_replicas != bool(objects(name, "ScaledObject"))
    scaled = objects("operators", "ScaledObject")["worker"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "demo-worker"
    ((trigger),) = scaled["triggers"]
    assert metrics_in(trigger["metadata"]["query"]) <= set(listed())


def test_prometheus_gets_the_names_of_jobs_that_the_alerts_ask_for() -> None:
    monitors = objects("operators", "PodMonitor")
    jobs = {
        relabeling["replacement"]
        for monitor in monitors.values()
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for relabeling in endpoint["relabelings"]
    }
    text = " ".join(rule["expr"] for rule in alerts().values())
    assert jobs == set(re.findall(r'job="(kvpool-(?:manager|worker))"', text))
    for component, monitor in monitors.items():
        deployment = objects("operators", "Deployment")[component]
        assert monitor["spec"]["selector"] == deployment["spec"]["selector"]
