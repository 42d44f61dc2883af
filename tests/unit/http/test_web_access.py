"""The web pages that may call a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dynamo.application.app import RouterApplication
from dynamo.communication.http import Request, WebAccess
from dynamo.communication.http.web_access import MAX_ACCEPTED_HOSTS
from dynamo.core.clock import SystemClock
from dynamo.core.errors import Forbidden
from dynamo.core.settings.schema import RouterSettings, ServerSettings
from dynamo.telemetry.metrics import Registry

LOCAL = "127.0.0.1:8000"
KEYS = {"api_keys": ("a",)}
NAMED = {"allowed_hosts": ("llm.example.com",)}
PAGES = {"cors_origins": ("loopback", "https://App.example/")}
CROSS = {"sec-fetch-site": "cross-site"}
LINK = CROSS | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def refusal(
    headers: Mapping[str, str], *, listen: str = "127.0.0.1", method: str = "GET", **settings: Any
) -> str:
    """Return the message and hint of the error; "" if the request is accepted."""
    rules = WebAccess.of_api(listen, ServerSettings(**settings))
    encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    request = Request(method, b"/v1/models", encoded)
    try:
        rules.check(request)
        rules.check(request)  # by then the host is known
    except Forbidden as error:
        return f"{error.message}: {error.hint}"
    return ""


@pytest.mark.parametrize(
    ("accepted", "host", "listen", "settings"),
    [
        (True, LOCAL, "127.0.0.1", {}),
        (True, "localhost", "localhost", {}),
        (True, "LocalHost:3", "::1", {}),
        (True, "[::1]:8000", "::1", {}),
        (True, "192.168.1.5:8000", "127.0.0.1", {}),
        (True, "web.localhost", "127.0.0.1", {}),
        (True, "frontend:8000", "127.0.0.1", {}),
        (True, "", "127.0.0.1", {}),
        (False, "evil.example", "127.0.0.1", {}),
        (False, "evil.example:8000", "localhost", {}),
        (False, "evil.example.:8000", "::1", {}),
        (False, "localhost.evil.example", "127.0.0.1", {}),
        (False, "127.0.0.1.evil.example", "127.0.0.1", {}),
        (False, "localhost@evil.example", "127.0.0.1", {}),
        (False, "127.0.0.1:80:80", "127.0.0.1", {}),
        (False, "127.0.0.1, evil.example", "127.0.0.1", {}),
        (False, "\xe9vil", "127.0.0.1", {}),
        (True, "LLM.example.com:8000", "127.0.0.1", NAMED),
        (True, "evil.example", "127.0.0.1", {"allowed_hosts": ("*",)}),
        (True, "evil.example", "127.0.0.1", KEYS),
        (False, "evil.example", "127.0.0.1", KEYS | NAMED),
        (True, "llm.example.com", "0.0.0.0", {}),
        (False, "evil.example", "0.0.0.0", NAMED),
    ],
)
def test_host(accepted: bool, host: str, listen: str, settings: dict[str, Any]) -> None:
    message = refusal({"host": host}, listen=listen, **settings)
    assert (message == "") is accepted
    assert accepted or "server.allowed_hosts" in message


@pytest.mark.parametrize(
    ("accepted", "origin", "host", "settings"),
    [
        (True, "http://localhost:3000", LOCAL, {}),
        (True, "https://localhost", LOCAL, {}),
        (True, "http://127.0.0.1:5173", LOCAL, {}),
        (True, "http://[::1]:80", LOCAL, {}),
        (False, "https://evil.example", LOCAL, {}),
        (False, "null", LOCAL, {}),
        (False, "", LOCAL, {}),
        (False, "file://", LOCAL, {}),
        (False, "http://localhost.evil.example", LOCAL, {}),
        (False, "http://localhost:3000@evil.example", LOCAL, {}),
        (False, "http://localhost:3000, https://evil.example", LOCAL, {}),
        (False, "ftp://localhost", LOCAL, {}),
        (False, "http://127.0.0.1.evil.example", LOCAL, {}),
        (True, "https://app.example", LOCAL, PAGES),
        (True, "http://localhost:1", LOCAL, PAGES),
        (False, "https://app.example.evil.example", LOCAL, PAGES),
        (False, "http://app.example", LOCAL, PAGES),
        (False, "http://localhost:1", LOCAL, {"cors_origins": ("https://app.example",)}),
        (True, "http://localhost:8000", "localhost:8000", {"cors_origins": ()}),
        (True, "http://192.168.1.5:8000", "192.168.1.5:8000", {"cors_origins": ()}),
        (False, "http://192.168.1.5:9000", "192.168.1.5:8000", {"cors_origins": ()}),
        (False, "http://evil:8000", "evil:8000", {}),
        (True, "https://llm.example.com", "llm.example.com", NAMED),
        (True, "https://llm.example.com", "llm.example.com", KEYS),
        (False, "https://evil.example", "llm.example.com", KEYS),
        (True, "null", LOCAL, {"cors_origins": ("*",)}),
    ],
)
def test_origin(accepted: bool, origin: str, host: str, settings: dict[str, Any]) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        message = refusal({"host": host, "origin": origin}, method=method, **settings)
        assert (message == "") is accepted
        assert accepted or "server.cors_origins" in message


def test_a_rebound_page_of_a_server_for_other_hosts_sends_nothing() -> None:
    """Beyond loopback any host name is accepted, but not as the origin of a page."""
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    assert refusal(headers, listen="0.0.0.0")


@pytest.mark.parametrize(
    ("accepted", "method", "headers"),
    [
        (False, "GET", CROSS),
        (False, "GET", CROSS | {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}),
        (False, "GET", LINK | {"sec-fetch-dest": "iframe"}),
        (False, "POST", CROSS),
        (False, "POST", LINK),
        (True, "GET", LINK),
        (True, "GET", {"sec-fetch-site": "same-origin"}),
        (True, "GET", {"sec-fetch-site": "same-site"}),
        (True, "GET", {"sec-fetch-site": "none"}),
    ],
)
def test_pages_of_other_sites_only_link(
    accepted: bool, method: str, headers: dict[str, str]
) -> None:
    message = refusal({"host": LOCAL} | headers, method=method)
    assert (message == "") is accepted
    anyone = {"cors_origins": ("*",)}
    assert refusal({"host": LOCAL} | headers, method=method, **anyone) == ""


def test_a_status_port_asks_for_no_key_and_checks_hosts_on_loopback() -> None:
    server = ServerSettings(api_keys=("a",), allowed_hosts=("llm.example.com",))
    request = Request("GET", b"/metrics", {b"host": b"evil.example"})
    with pytest.raises(Forbidden):
        WebAccess.of_status_port("127.0.0.1", server).check(request)
    WebAccess.of_status_port("0.0.0.0", server).check(request)


@pytest.mark.parametrize("api_keys", [(), ("a",)])
def test_a_router_process_has_the_same_rules(api_keys: tuple[str, ...]) -> None:
    server, router = ServerSettings(api_keys=api_keys), RouterSettings()
    application = RouterApplication(
        server, router.host, {}, SystemClock(), Registry(), reasons=dict, facts=dict
    )
    evil = {b"host": b"127.0.0.1:8001", b"origin": b"https://evil.example"}
    with pytest.raises(Forbidden):
        application.check_headers(Request("GET", b"/router/report", evil))
    rebound = Request("GET", b"/router/report", {b"host": b"evil.example:8001"})
    if api_keys:
        application.check_headers(rebound)  # the page asks for the key
    else:
        with pytest.raises(Forbidden):
            application.check_headers(rebound)


def test_few_accepted_hosts_are_remembered() -> None:
    rules = WebAccess.of_api("127.0.0.1", ServerSettings())
    for number in range(3 * MAX_ACCEPTED_HOSTS):
        rules.check(Request("GET", b"/", {b"host": b"host%d" % number}))
    assert len(rules._accepted_hosts) <= MAX_ACCEPTED_HOSTS
