"""Requests to an API server: from a pod, and through `kubectl proxy`."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.kubernetes import account_environment

from dynamo.communication.kubernetes.link import ApiServerError, ProxyLink, open_link
from dynamo.core.errors import PlaneUnavailable
from dynamo.testing.kubernetes.server import ApiServer

SCRIPTS = Path(sys.executable).parent
NAMESPACES = "/api/v1/namespaces"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


async def test_a_failure_says_what_the_server_says(server: ApiServer, tmp_path: Path) -> None:
    token = server.access.account_token("default", "worker")
    link = open_link(5.0, account_environment(server.url, token, tmp_path / "account"))
    with pytest.raises(ApiServerError, match='User "system:serviceaccount:default:worker" cannot'):
        await link.request("GET", NAMESPACES)
    server.faults.code, server.faults.retry_after_s = 429, 7
    with pytest.raises(ApiServerError) as caught:
        await link.request("GET", NAMESPACES)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 7.0)
    await link.close()


async def test_kinds_that_are_missing_are_named(server: ApiServer, tmp_path: Path) -> None:
    link = open_link(30.0, account_environment(server.url, "admintoken", tmp_path))
    with pytest.raises(
        ApiServerError, match=r"answered 404 .*`dynamo kubernetes crds` prints them"
    ):
        await link.request("GET", "/apis/nvidia.com/v1alpha1/dynamoworkermetadatas?limit=1")
    await link.close()


async def test_a_namespace_is_that_of_the_account(server: ApiServer, tmp_path: Path) -> None:
    environment = account_environment(server.url, "admintoken", tmp_path)
    (tmp_path / "namespace").write_text("lab\n", encoding="ascii")
    link = open_link(5.0, environment)
    assert link.namespace == "lab"
    await link.close()


async def test_a_server_that_hangs_is_given_up(server: ApiServer, tmp_path: Path) -> None:
    link = open_link(0.2, account_environment(server.url, "admintoken", tmp_path))
    server.faults.hanging.clear()
    with pytest.raises(PlaneUnavailable, match=r"no answer within 0\.2 s"):
        await link.request("GET", NAMESPACES)
    server.faults.hanging.set()
    await link.close()


async def test_an_answer_that_arrives_in_parts_is_waited_for(tmp_path: Path) -> None:
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            writer.write(b"1")
            await asyncio.sleep(0.3)
        writer.close()
        await writer.wait_closed()
        served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        link = open_link(2.0, account_environment(url, "token", tmp_path))
        assert await link.request("GET", NAMESPACES) == b"1" * 8
        await link.close()
        await served.wait()


async def test_a_server_elsewhere_needs_a_ca(tmp_path: Path) -> None:
    link = open_link(1.0, account_environment("https://192.0.2.1:443", "token", tmp_path))
    with pytest.raises(PlaneUnavailable, match=r"has no ca\.crt"):
        await link.request("GET", NAMESPACES)
    await link.close()


async def test_served_versions_are_chosen_by_the_client(server: ApiServer, tmp_path: Path) -> None:
    link = open_link(5.0, account_environment(server.url, "admintoken", tmp_path))
    assert await link.served_version("discovery.k8s.io", ("v2", "v1")) == "v1"
    with pytest.raises(PlaneUnavailable, match=r"has discovery\.k8s\.io as v1, and v9 is"):
        await link.served_version("discovery.k8s.io", ("v9",))
    await link.close()


@pytest.mark.skipif(not (SCRIPTS / "kubectl").exists(), reason="needs kubectl")
async def test_outside_of_a_cluster_kubectl_is_the_way(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_bytes(msgspec.json.encode(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("PATH", f"{SCRIPTS}:{os.environ['PATH']}")
    link = open_link(20.0, {})
    assert isinstance(link, ProxyLink)
    assert b'"default"' in await link.request("GET", NAMESPACES)
    await link.close()


async def test_without_account_and_kubectl_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    link = open_link(1.0, {})
    with pytest.raises(PlaneUnavailable, match="no pod's service account, and finds no kubectl"):
        await link.request("GET", NAMESPACES)
    await link.close()
