"""etcd and NATS with TLS, client certificates, and users."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificates import has_openssl, make_authority, make_certificate
from tests.support.servers import EtcdProcess, NatsProcess

from dynamo.communication.discovery import open_discovery
from dynamo.communication.nats_client import NatsClient
from dynamo.communication.options import PlaneOptions, TlsFiles
from dynamo.communication.requests import open_requests
from dynamo.core.errors import ConfigError, PlaneUnavailable


@pytest.fixture
async def opened() -> AsyncIterator[list[Any]]:
    planes: list[Any] = []
    yield planes
    for plane in planes:
        await plane.close()


async def test_a_server_with_tls_and_users(tmp_path: Path, opened: list[Any]) -> None:
    if not has_openssl():
        pytest.skip("openssl makes the certificates")
    make_authority(tmp_path)
    tls = make_certificate(tmp_path, "server")
    client = make_certificate(tmp_path, "client")
    flags = f"--tls --tlscert={tls.cert} --tlskey={tls.key} --tlsverify --tlscacert={tls.ca}"
    with NatsProcess(*flags.split(), "--user", "u", "--pass", "secret word") as server:
        options = PlaneOptions(
            server_tls=client, user="u", password="secret word", reconnect_wait_s=0.1
        )
        nats = await NatsClient.open(server.url, options)
        opened.append(nats)
        await nats.wait_connected()
        wrong = await NatsClient.open(server.url, PlaneOptions(server_tls=TlsFiles(ca=client.ca)))
        opened.append(wrong)
        await wrong.first_attempt_done.wait()
        assert wrong.connection_error


async def test_etcd_with_tls(tmp_path: Path, opened: list[Any]) -> None:
    if not has_openssl():
        pytest.skip("openssl makes the certificates")
    make_authority(tmp_path)
    tls, client = make_certificate(tmp_path, "server"), make_certificate(tmp_path, "client")
    flags = f"--cert-file={tls.cert} --key-file={tls.key} --client-cert-auth "
    flags += f"--trusted-ca-file={tls.ca}"
    with EtcdProcess(*flags.split(), scheme="https") as server:
        plane = await open_discovery(server.url, PlaneOptions(server_tls=client))
        opened.append(plane)
        await plane.put("/k", b"1")
        assert dict(await plane.get("/")) == {"/k": b"1"}

        make_authority(tmp_path, "other")
        for stranger in (TlsFiles(ca=client.ca), make_certificate(tmp_path, "evil", "other")):
            wrong = await open_discovery(server.url, PlaneOptions(server_tls=stranger))
            opened.append(wrong)
            with pytest.raises(PlaneUnavailable, match=r"SSL.*certificate"):
                await wrong.get("/")


async def test_missing_certificate_files_raise_at_once() -> None:
    options = PlaneOptions(server_tls=TlsFiles(ca="/nowhere/ca.pem"))
    with pytest.raises(ConfigError, match="/nowhere/ca"):
        await open_discovery("etcds://127.0.0.1:1", options)
    with pytest.raises(ConfigError, match="/nowhere/ca"):
        await open_requests("nats:tls://127.0.0.1:1", options)
