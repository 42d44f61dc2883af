"""Tests that a backend with a missing library names the extra to install."""

from __future__ import annotations

import sys

import pytest

from dynamo.communication.discovery import open_discovery
from dynamo.communication.requests import open_requests
from dynamo.core.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "library", "module", "extra"),
    [
        ("etcd://h:1", "aetcd", "dynamo.communication.discovery.etcd_client", "etcd"),
        ("etcds://h:1", "aetcd", "dynamo.communication.discovery.etcd_client", "etcd"),
    ],
)
async def test_a_missing_library_is_named(
    url: str, library: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.startswith("dynamo.communication.discovery.etcd")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=library) as error:
        await open_discovery(url)
    assert f"[{extra}]" in error.value.hint


async def test_missing_nats_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nats_client", "nats_transport", "requests.nats"):
        monkeypatch.delitem(sys.modules, f"dynamo.communication.{name}", raising=False)
    for name in [name for name in sys.modules if name == "nats" or name.startswith("nats.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(ConfigError, match="nats") as error:
        await open_requests("nats://h:1")
    assert "[nats]" in error.value.hint
