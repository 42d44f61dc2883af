"""Planes derived from settings: URLs and options."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import resolve_settings
from dynamo.core.settings.values import SourcedValue
from dynamo.runtime.calls.instances import Instance, encode_instance
from dynamo.runtime.planes import Planes, planes_of


def planes(environ: dict[str, str] | None = None, **flags: object) -> Planes:
    values = {
        key.replace("__", "."): SourcedValue(value, f"flag --{key}") for key, value in flags.items()
    }
    return planes_of(
        resolve_settings(values, {"DYNAMO_RUNTIME__DEPLOYMENT": "x", **(environ or {})}).settings
    )


def test_the_default_planes_need_no_server() -> None:
    result = planes()
    assert result.discovery.startswith("file:")
    assert (result.requests, result.events) == ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    assert result.redacted_urls()["discovery"] == "file:"


def test_two_environment_variables_select_the_planes() -> None:
    result = planes(
        {"DYNAMO_ETCD_ENDPOINTS": "http://a:2379, b:2379", "DYNAMO_NATS_URL": "nats://u:p@n:4222"}
    )
    assert result.discovery == "etcd://a:2379,b:2379"
    assert result.requests == result.events == "nats://u:p@n:4222"
    assert result.redacted_urls()["events"] == "nats://***@n:4222"


@pytest.mark.parametrize(
    ("endpoints", "url"),
    [
        ("https://a:1,https://b:2", "etcds://a:1,b:2"),
        ("http://[::1]:2379/", "etcd://[::1]:2379"),
    ],
)
def test_etcd_endpoints_become_a_url(endpoints: str, url: str) -> None:
    assert planes(discovery__etcd__endpoints=endpoints).discovery == url


@pytest.mark.parametrize("endpoints", ["http://a:1,https://b:1", "ftp://a:1"])
def test_mixed_and_unknown_schemes_of_endpoints_are_refused(endpoints: str) -> None:
    with pytest.raises(ConfigError, match="all http"):
        planes(discovery__etcd__endpoints=endpoints)


def test_a_type_without_servers_means_the_local_server() -> None:
    result = planes(discovery__type="etcd", messaging__type="nats")
    assert (result.discovery, result.events) == ("etcd://127.0.0.1:2379", "nats://127.0.0.1:4222")


def test_kubernetes_is_chosen_by_its_type_and_by_pods_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert planes(discovery__type="kubernetes").discovery == "kubernetes:"
    monkeypatch.setenv("DYN_PARENT_DGD_K8S_NAME", "qwen")
    assert planes().discovery.startswith("file:")
    monkeypatch.setenv("POD_UID", "1")
    assert planes().discovery == "kubernetes:"
    assert planes(discovery__etcd__endpoints="http://a:1").discovery == "etcd://a:1"
    assert planes(runtime__discovery="memory:").discovery == "memory:"


def test_a_plane_url_takes_precedence_over_the_sections() -> None:
    result = planes(
        {"DYNAMO_NATS_URL": "nats://n:4222"}, runtime__requests="tcp:", runtime__discovery="memory:"
    )
    assert (result.discovery, result.requests, result.events) == (
        "memory:",
        "tcp:",
        "nats://n:4222",
    )


def test_servers_with_tls() -> None:
    result = planes(messaging__nats__servers="tls://a:1,tls://b:2")
    assert result.events == "nats:tls://a:1,tls://b:2"


def test_the_options_of_the_planes() -> None:
    result = planes(
        runtime__plane_host="::",
        runtime__lease_ttl="10s",
        security__secret="0123456789abcdef",
        discovery__etcd__ca="etcd.pem",
        messaging__nats__username="u",
        messaging__nats__password="p",
        messaging__nats__max_reconnect=3,
    )
    assert result.requests == result.messaging_options.direct_url == "tcp://[::]:0"
    assert result.discovery_options.lease_ttl_s == 10.0
    assert (result.discovery_options.server_tls.ca, result.messaging_options.server_tls.ca) == (
        "etcd.pem",
        "",
    )
    assert (result.messaging_options.user, result.discovery_options.user) == ("u", "")
    assert result.messaging_options.secret == "0123456789abcdef"
    assert result.messaging_options.max_reconnect == 3


def test_a_record_names_its_transport_like_the_published_documents() -> None:
    for address, name in (("nats://1/tcp://h:1/2", "nats_tcp"), ("tcp://h:1/2", "tcp")):
        record = encode_instance(Instance("i", address, "ns", "c", "e"))
        assert f'"transport":{{"{name}":"{address}"}}'.encode() in record


SECRET = {"security__secret": "0123456789abcdef"}
TLS = {"security__tls_ca": "ca.pem", "security__tls_cert": "c.pem", "security__tls_key": "k.pem"}


@pytest.mark.parametrize(
    ("flags", "unencrypted"),
    [
        ({}, False),
        (SECRET, False),
        (SECRET | {"runtime__plane_host": "0.0.0.0"}, True),
        (SECRET | {"runtime__plane_host": "::1"}, False),
        (SECRET | {"runtime__events": "tcp://10.0.0.1:0"}, True),
        (SECRET | TLS | {"runtime__plane_host": "0.0.0.0"}, False),
        (SECRET | {"runtime__plane_host": "0.0.0.0", "messaging__type": "nats"}, True),
    ],
)
def test_a_secret_alone_beyond_loopback_is_unencrypted(
    flags: dict[str, str], unencrypted: bool
) -> None:
    assert planes(**flags).unencrypted == unencrypted


@pytest.mark.parametrize(
    ("flags", "is_open"),
    [
        ({}, False),
        ({"discovery__type": "etcd"}, True),
        ({"discovery__type": "etcd", "messaging__type": "nats"}, True),
        ({"discovery__type": "etcd"} | SECRET, False),
        ({"discovery__type": "etcd"} | TLS, False),
        ({"runtime__discovery": "memory:"}, False),
    ],
)
def test_planes_without_a_folder_or_a_secret_are_open_to_other_users(
    flags: dict[str, str], is_open: bool
) -> None:
    assert planes(**flags).open_to_other_users == is_open


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "auto://127.0.0.1:0"),
        ({"runtime__plane_host": "::1"}, "auto://[::1]:0"),
        ({"runtime__transfer": "auto", "runtime__plane_host": "10.0.0.1"}, "auto://10.0.0.1:0"),
        ({"runtime__transfer": "shm:"}, "shm:"),
        ({"runtime__requests": "memory:"}, "memory:"),
    ],
)
def test_the_transfer_plane_follows_the_other_planes(settings: dict[str, str], url: str) -> None:
    assert planes(**settings).transfer == url


def test_an_unknown_transfer_plane_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown transfer backend 'rdma'") as caught:
        planes(runtime__transfer="rdma:")
    assert "shm" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runtime__transfer": "memory:"}, "copies within one process"),
        ({"runtime__transfer": "tcp:host:80"}, "is not an address"),
        ({"runtime__transfer": "auto://host:port"}, "is not an address"),
    ],
)
def test_a_transfer_plane_that_cannot_work_is_refused(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        planes(**settings)
    assert "tcp://" in caught.value.hint
