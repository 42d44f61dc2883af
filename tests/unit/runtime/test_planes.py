"""Which planes the settings come to."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import resolve_settings
from dynamo.core.settings.values import SourcedValue
from dynamo.runtime.calls.instances import Instance, encode_instance
from dynamo.runtime.planes import Planes, planes_of


def planes(environ: dict[str, str] | None = None, **flags: object) -> Planes:
    given = {
        key.replace("__", "."): SourcedValue(value, f"flag --{key}") for key, value in flags.items()
    }
    return planes_of(
        resolve_settings(given, {"DYNAMO_RUNTIME__DEPLOYMENT": "x", **(environ or {})}).settings
    )


def test_no_server_is_the_default() -> None:
    made = planes()
    assert made.discovery.startswith("file:")
    assert (made.requests, made.events) == ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    assert made.redacted_urls()["discovery"] == "file:"


def test_the_two_variables_choose_the_planes() -> None:
    made = planes(
        {"DYNAMO_ETCD_ENDPOINTS": "http://a:2379, b:2379", "DYNAMO_NATS_URL": "nats://u:p@n:4222"}
    )
    assert made.discovery == "etcd://a:2379,b:2379"
    assert made.requests == made.events == "nats://u:p@n:4222"
    assert made.redacted_urls()["events"] == "nats://n:4222"


@pytest.mark.parametrize(
    ("endpoints", "url"),
    [
        ("https://a:1,https://b:2", "etcds://a:1,b:2"),
        ("http://[::1]:2379/", "etcd://[::1]:2379"),
    ],
)
def test_endpoints_as_etcd_spells_them(endpoints: str, url: str) -> None:
    assert planes(discovery__etcd__endpoints=endpoints).discovery == url


@pytest.mark.parametrize("endpoints", ["http://a:1,https://b:1", "ftp://a:1"])
def test_endpoints_that_cannot_be(endpoints: str) -> None:
    with pytest.raises(ConfigError, match="all http"):
        planes(discovery__etcd__endpoints=endpoints)


def test_a_type_alone_means_the_local_server() -> None:
    made = planes(discovery__type="etcd", messaging__type="nats")
    assert (made.discovery, made.events) == ("etcd://127.0.0.1:2379", "nats://127.0.0.1:4222")


def test_a_plane_given_by_url_stands_before_the_sections() -> None:
    made = planes(
        {"DYNAMO_NATS_URL": "nats://n:4222"}, runtime__requests="tcp:", runtime__discovery="memory:"
    )
    assert (made.discovery, made.requests, made.events) == ("memory:", "tcp:", "nats://n:4222")


def test_servers_with_tls() -> None:
    made = planes(messaging__nats__servers="tls://a:1,tls://b:2")
    assert made.events == "nats:tls://a:1,tls://b:2"


def test_what_planes_are_opened_with() -> None:
    made = planes(
        runtime__plane_host="::",
        runtime__lease_ttl="10s",
        security__secret="0123456789abcdef",
        discovery__etcd__ca="etcd.pem",
        messaging__nats__username="u",
        messaging__nats__password="p",
        messaging__nats__max_reconnect=3,
    )
    assert made.requests == made.messaging_options.direct_url == "tcp://[::]:0"
    assert made.discovery_options.lease_ttl_s == 10.0
    assert (made.discovery_options.server_tls.ca, made.messaging_options.server_tls.ca) == (
        "etcd.pem",
        "",
    )
    assert (made.messaging_options.user, made.discovery_options.user) == ("u", "")
    assert made.messaging_options.secret == "0123456789abcdef"
    assert made.messaging_options.max_reconnect == 3


def test_a_record_names_its_transport_as_published_documents_do() -> None:
    for address, name in (("nats://1/tcp://h:1/2", "nats_tcp"), ("tcp://h:1/2", "tcp")):
        record = encode_instance(Instance("i", address, "ns", "c", "e"))
        assert f'"transport":{{"{name}":"{address}"}}'.encode() in record
