"""`python -m dynamo.testing.kubernetes` with kubectl, as a user on a laptop has it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

KUBECTL = Path(sysconfig.get_path("scripts")) / "kubectl"
pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None or not KUBECTL.exists(), reason="needs openssl and kubectl"
)
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
    """Yield the environment of kubectl for a cluster that is a process of its own."""
    folder = tmp_path_factory.mktemp("cluster")
    env = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.testing.kubernetes"], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search("KUBECONFIG=(.+)", line):
            yield {**env, "KUBECONFIG": match[1], "HOME": str(folder)}
            break
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert not list(folder.glob("kube-*"))


def kubectl(env: dict[str, str], *arguments: str, text: str = "") -> str:
    done = subprocess.run(
        [KUBECTL, *arguments], env=env, input=text, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_applied_deployment_serves_and_ends(cluster: dict[str, str]) -> None:
    assert "node-0" in kubectl(cluster, "get", "nodes")
    kubectl(cluster, "apply", "-f", "-", text=WEB)
    kubectl(cluster, "rollout", "status", "deploy/web", "--timeout=60s")
    address = kubectl(cluster, "get", "svc", "web", "-o", "jsonpath={.spec.clusterIP}")
    with urlopen(f"http://{address.replace('10.', '127.', 1)}:8080/", timeout=60) as answer:
        assert b"Directory listing" in answer.read()
    assert "GET / HTTP/1.1" in kubectl(cluster, "logs", "-l", "app=web")
    assert "Service Account" in kubectl(cluster, "describe", "pods")
    kubectl(cluster, "scale", "deploy/web", "--replicas=1")
    kubectl(cluster, "delete", "deploy/web", "svc/web")
    kubectl(cluster, "wait", "--for=delete", "pod", "-l", "app=web", "--timeout=60s")
