"""Messages for a user whose cluster is away, too old for the token, or gives no rights."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.kubernetes import account_environment
from tests.support.kubernetes_graphs import GraphCluster
from tests.support.laptop_cluster import KUBECTL

from dynamo.cli import main


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[GraphCluster]:
    async with GraphCluster(tmp_path) as cluster:
        yield cluster
        cluster.server.access.refused.clear()


@pytest.mark.parametrize(
    ("account", "namespace", "code", "text"),
    [
        (
            "nobody",
            "",
            1,
            'cannot list resource "dynamographdeployments" in API group "nvidia.com" at the clus',
        ),
        ("nobody", "default", 1, 'cannot list resource "dynamographdeployments" in API group'),
        ("", "", 1, "hint: log in again: the token has expired, or is of another cluster"),
        ("dynamo-operator", "nowhere", 0, "no graphs in nowhere"),
    ],
)
async def test_status_says_what_is_wrong(
    cluster: GraphCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    account: str,
    namespace: str,
    code: int,
    text: str,
) -> None:
    access = cluster.server.access
    token = access.account_token("dynamo-system", account) if account else "old"
    environment = account_environment(cluster.server.url, token, tmp_path / "user")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    flags = ["--namespace", namespace] if namespace else []
    assert await asyncio.to_thread(main, ["kubernetes", "status", *flags]) == code
    output = capsys.readouterr()
    assert text in output.out + output.err
    assert "Traceback" not in output.err


async def test_an_administrator_reads_that_a_namespace_is_not_there(
    cluster: GraphCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = account_environment(cluster.server.url, "admintoken", tmp_path / "user")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments = ["kubernetes", "status", "--namespace", "nowhere"]
    assert await asyncio.to_thread(main, arguments) == 1
    assert 'namespaces "nowhere" not found' in capsys.readouterr().err


@pytest.mark.skipif(not KUBECTL.exists(), reason="needs kubectl")
@pytest.mark.parametrize("action", ["status", "operator"])
def test_without_a_cluster_one_line_says_what_to_do(action: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    env |= {"KUBECONFIG": str(tmp_path / "none"), "PATH": f"{KUBECTL.parent}:{env['PATH']}"}
    command = [sys.executable, "-m", "dynamo", "kubernetes", action]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "does `kubectl version` reach the cluster? KUBECONFIG names the file" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
