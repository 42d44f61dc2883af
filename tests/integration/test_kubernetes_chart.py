"""The chart of the operator, by Helm on the cluster of a laptop."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.helm import find_helm
from tests.support.laptop_cluster import KUBECTL, kubectl, laptop_cluster

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "dynamo"
EXAMPLE = ROOT / "examples" / "kubernetes" / "mock.yaml"
KINDS = (
    "deploy,rs,pods,svc,secrets,configmaps,serviceaccounts,roles,rolebindings,netpol,pdb,leases,"
    "clusterroles,clusterrolebindings,crds"
)
pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None or not KUBECTL.exists(), reason="needs openssl and kubectl"
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    with laptop_cluster(tmp_path) as env:
        yield env


def test_helm_installs_upgrades_and_leaves_nothing(cluster: dict[str, str]) -> None:
    program = find_helm()
    if program is None:
        pytest.skip("helm is not to be had")

    def helm(*words: str) -> str:
        command = [program, "-n", "dynamo-system", *words]
        done = subprocess.run(
            command, env=cluster, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = kubectl(cluster, "get", KINDS, "-A", "-o", "name")
    wait = ("--wait", "--timeout=120s")
    options = ("--set=keepCrds=false", *wait)
    helm("install", "dynamo", str(CHART), "--create-namespace", *options)
    kubectl(cluster, "apply", "-f", str(EXAMPLE))
    kubectl(cluster, "wait", "--for=condition=Ready", "dgd/mock", "--timeout=110s")
    helm("upgrade", "dynamo", str(CHART), "--set=replicas=2", *options)
    operator = ("-n", "dynamo-system", "get", "deploy", "-o=jsonpath={.items[*].spec.replicas}")
    assert kubectl(cluster, *operator) == "2"
    helm("rollback", "dynamo", "1", *wait)
    assert kubectl(cluster, *operator) == "1"
    assert kubectl(cluster, "get", "dgd", "mock", "-o=jsonpath={.status.state}") == "successful"
    kubectl(cluster, "delete", "dgd", "mock")
    kubectl(cluster, "wait", "--for=delete", "pod", "--all", "--timeout=90s")
    helm("uninstall", "dynamo", *wait)
    kubectl(cluster, "delete", "namespace", "dynamo-system", "--timeout=60s")
    kubectl(cluster, "-n", "kube-system", "delete", "lease", "dynamo-operator")
    assert kubectl(cluster, "get", KINDS, "-A", "-o", "name") == before
