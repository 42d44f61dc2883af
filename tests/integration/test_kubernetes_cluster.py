"""`python -m dynamo.testing.kubernetes` with kubectl, as a user on a laptop has it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import kubernetes_validate
import pytest
import yaml
from tests.conftest import until
from tests.support.laptop_cluster import KUBECTL, kubectl, laptop_cluster

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None or not KUBECTL.exists(), reason="needs openssl and kubectl"
)
DEPLOY = Path(__file__).parents[2] / "deploy" / "deploy.sh"
INSTALLATION = Path(__file__).parents[2] / "deploy" / "kubernetes"
EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = Path(__file__).parents[1] / "data" / "kubernetes"
WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: main
        image: dynamo:latest
        command: [python3, -u, -m, http.server, --bind, 0.0.0.0, "8000"]
        ports: [{name: http, containerPort: 8000}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 8080, targetPort: http}]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with laptop_cluster(tmp_path_factory.mktemp("cluster")) as env:
        yield env


def test_the_deploy_script_serves_a_graph(cluster: dict[str, str]) -> None:
    def deploy(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [DEPLOY, "--kubernetes", *words], env={**cluster, "START_TIMEOUT": "90"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    assert f"start it: {DEPLOY} --kubernetes start" in deploy("status", code=1)
    assert "kubectl port-forward service/mock-frontend 8000:8000" in deploy("start")
    assert deploy("status").endswith("the graph mock is ready\n")
    assert "[pod/mock-worker-" in deploy("logs", "worker", "--no-follow")
    kubectl(cluster, "create", "namespace", "other")
    other = EXAMPLES / "mock.yaml"
    kubectl(cluster, "apply", "-n", "other", "-f", str(other))
    assert "the operator stays" in deploy("cleanup")
    kubectl(cluster, "delete", "-n", "other", "-f", str(other))
    assert 'clusterrole.rbac.authorization.k8s.io "dynamo-operator" deleted' in deploy("cleanup")
    deploy("cleanup")
    assert "--infra has no meaning with --kubernetes" in deploy("--infra", "start", code=2)


def address_of(env: dict[str, str], service: str) -> str:
    """Return the address of a Service on this host."""
    address = kubectl(env, "get", "svc", service, "-o", "jsonpath={.spec.clusterIP}")
    return address.replace("10.", "127.", 1)


def operator_log(env: dict[str, str]) -> str:
    """Return the log of the operator's pod, which lacks no right."""
    log = kubectl(env, "-n", "dynamo-system", "logs", "deploy/dynamo-operator")
    assert "Traceback" not in log
    assert "403" not in log
    return log


@pytest.fixture(scope="module")
def operator(cluster: dict[str, str]) -> Iterator[None]:
    """Install the operator as a pod, and what manifests refer to."""
    kubectl(cluster, "apply", "--server-side", "-k", str(INSTALLATION))
    secret = ("create", "secret", "generic", "hf-token-secret", "--from-literal=HF_TOKEN=none")
    kubectl(cluster, *secret)
    kubectl(cluster, "create", "configmap", "planner-profile-data")
    where = ("-n", "dynamo-system")
    kubectl(cluster, *where, "rollout", "status", "deploy/dynamo-operator", "--timeout=90s")
    yield
    until(lambda: "this operator leads" in operator_log(cluster))
    kubectl(cluster, "delete", "-k", str(INSTALLATION), "--ignore-not-found", "--timeout=90s")


@pytest.mark.usefixtures("operator")
def test_mocker_example_serves_disaggregated(cluster: dict[str, str], tiny_model: Path) -> None:
    graph = yaml.safe_load((MANIFESTS / "v1beta1_mocker_disagg.yaml").read_text())
    for component in graph["spec"]["components"]:
        (main,) = component["podTemplate"]["spec"]["containers"]
        main["image"] = "dynamo:latest-vllm"
        if "args" in main:
            main["args"][1], main["args"][3] = str(tiny_model), "tiny"
    kubectl(cluster, "apply", "-f", "-", text=yaml.safe_dump(graph))
    kubectl(cluster, "wait", "--for=condition=Ready", "dgd/mocker-disagg", "--timeout=90s")
    url = f"http://{address_of(cluster, 'mocker-disagg-frontend')}:8000"
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    with urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8
    logs = kubectl(cluster, "logs", "-l", "nvidia.com/dynamo-component=decode", "--tail=-1")
    assert "connected to a peer's KV blocks" in logs
    assert "this operator leads" in operator_log(cluster)
    kubectl(cluster, "delete", "dgd", "mocker-disagg")
    kubectl(cluster, "wait", "--for=delete", "pod", "--all", "--timeout=90s")
    assert not kubectl(cluster, "get", "deploy,svc,pdb,netpol,role", "-o", "name")


@pytest.mark.usefixtures("operator")
def test_manifests_of_nvidia_dynamo_apply_unchanged(cluster: dict[str, str]) -> None:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        text = path.read_text().replace("${VERSION}", "1.3.1")
        name = yaml.safe_load(text)["metadata"]["name"]
        kubectl(cluster, "apply", "-f", "-", text=text)
        kubectl(cluster, "wait", "--for=condition=SpecValid", f"dgd/{name}", "--timeout=60s")
        if "multinode" in text:
            reason = "jsonpath={.status.conditions[?(@.type=='Ready')].reason}"
            shown = kubectl(cluster, "get", "dgd", name, "-o", reason)
            assert shown == "MultinodeNeedsGroveOrLWS"
        else:
            pattern = "jsonpath={.status.components}"
            components = json.loads(kubectl(cluster, "get", "dgd", name, "-o", pattern))
            count = max(text.count("mainContainer:"), text.count("podTemplate:"))
            assert len(components) == count
            wanted = f"-l=nvidia.com/dynamo-graph-deployment-name={name}"
            until(lambda: "ImagePullBackOff" in kubectl(cluster, "get", "pods", wanted, "-o=yaml"))  # noqa: B023
        kubectl(cluster, "explain", "dgd.spec.components")
        kubectl(cluster, "delete", "dgd", name)
    kubectl(cluster, "wait", "--for=delete", "pod", "--all", "--timeout=60s")


def test_applied_deployment_serves_and_ends(cluster: dict[str, str]) -> None:
    assert "node-0" in kubectl(cluster, "get", "nodes")
    kubectl(cluster, "apply", "-f", "-", text=WEB)
    kubectl(cluster, "rollout", "status", "deploy/web", "--timeout=60s")
    with urlopen(f"http://{address_of(cluster, 'web')}:8080/", timeout=60) as answer:
        assert b"Directory listing" in answer.read()
    assert "GET / HTTP/1.1" in kubectl(cluster, "logs", "-l", "app=web")
    assert "Service Account" in kubectl(cluster, "describe", "pods")
    kubectl(cluster, "scale", "deploy/web", "--replicas=1")
    kubectl(cluster, "drain", "node-0", "--delete-emptydir-data", "--timeout=60s")
    kubectl(cluster, "uncordon", "node-0")
    kubectl(cluster, "delete", "deploy/web", "svc/web")
    kubectl(cluster, "wait", "--for=delete", "pod", "-l", "app=web", "--timeout=60s")


def test_settings_in_a_config_map_serve_and_change(
    cluster: dict[str, str], tiny_model: Path
) -> None:
    text = (EXAMPLES / "config.yaml").read_text()
    for item in yaml.safe_load_all(text):
        for version in ("1.30", "1.37"):
            kubernetes_validate.validate(item, version, strict=True)
    text = text.replace("names: [mock]", f"names: [mock]\n      path: {tiny_model}")
    kubectl(cluster, "apply", "-f", "-", text=text)
    kubectl(cluster, "rollout", "status", "deploy/dynamo", "--timeout=110s")
    with urlopen(f"http://{address_of(cluster, 'dynamo')}:8000/v1/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == "mock"
    text = text.replace("max_concurrent_requests: 64", "max_concurrent_requests: 32")
    kubectl(cluster, "apply", "-f", "-", text=text)
    changed = "setting=server.max_concurrent_requests before=64 after=32"
    until(lambda: changed in kubectl(cluster, "logs", "deploy/dynamo"))
    kubectl(cluster, "delete", "-f", "-", text=text)
    kubectl(cluster, "wait", "--for=delete", "pod", "-l", "app=dynamo", "--timeout=60s")
