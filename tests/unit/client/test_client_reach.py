"""TLS, and servers that are unreachable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_client import DynamoCertificateError, DynamoConnectionError

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def test_calls_and_streams_over_tls(
    make_client: Any, server: Any, parts: Any, certificate: tuple[Path, Path], monkeypatch: Any
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    server.add_answers(
        parts.reply(200, {"data": [{"id": "m"}]}),
        parts.stream(parts.event(parts.delta("a" * 70_000)), parts.event(parts.delta("b"))),
        parts.reply(200, {"status": "healthy"}),
    )
    client = make_client()

    assert await client.call("list_models") == [{"id": "m"}]
    assert await client.texts() == ["a" * 70_000, "b"]
    assert await client.call("health_check") == {"status": "healthy"}
    assert server.connections == 1


async def test_an_untrusted_certificate_raises_without_retries(
    make_client: Any, server: Any, certificate: tuple[Path, Path]
) -> None:
    client = make_client()
    with pytest.raises(DynamoCertificateError, match="is not trusted") as caught:
        await client.call("list_models")

    assert "SSL_CERT_FILE" in caught.value.hint
    assert client.network.pauses == []


async def test_the_hint_names_a_proxy_of_the_environment(
    make_client: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(max_retries=0)
    monkeypatch.setattr(client.network, "connect", refuse)
    with pytest.raises(DynamoConnectionError) as caught:
        await client.call("list_models")
    assert "`dynamo run`" in caught.value.hint

    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    with pytest.raises(DynamoConnectionError) as caught:
        await client.call("list_models")
    assert caught.value.hint.startswith("http_proxy is set")

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(DynamoConnectionError) as caught:
        await client.call("list_models")
    assert "`dynamo run`" in caught.value.hint


async def refuse(*_: Any) -> Any:
    raise ConnectionRefusedError("refused")
