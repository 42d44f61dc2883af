"""Web pages in a user's browser call the deployment on loopback."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.attacks.client import CHAT, chat, exchange, request_bytes
from tests.faults.cluster import Cluster
from tests.faults.stream_client import body_of

BODY = body_of(0, 2, 1) | {"stream": False, "stream_options": None}
PAGES = (
    "/v1/models",
    "/router/explain",
    "/router/report",
    "/router/timeline",
    "/metrics",
    "/health",
)
EVIL = "Origin: https://evil.example"
IMAGE = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image")


def status_urls(deployment: Cluster) -> list[str]:
    roles = ("frontend", "worker", "supervisor")
    return [record.status_url for role in roles for record in deployment.processes(role)]


@pytest.mark.attack(
    "a web page of another site sends requests (fetch, form, preflight, image, WebSocket)",
    "403 before any work, and no header that lets the page read the answer",
)
def test_pages_of_other_sites_are_refused(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    text, form = "Content-Type: text/plain", "Content-Type: application/x-www-form-urlencoded"
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", EVIL)
    attempts = [
        request_bytes(BODY, headers=(EVIL, text)),
        request_bytes(BODY, headers=(EVIL, form, "Sec-Fetch-Site: cross-site")),
        request_bytes(BODY, headers=(EVIL,)),
        request_bytes(BODY, headers=("Origin: null", text)),
        request_bytes(BODY, headers=("Origin: http://localhost.evil.example:3000",)),
        request_bytes(BODY, headers=("Sec-Fetch-Site: cross-site", text)),
        request_bytes(method="OPTIONS", headers=(EVIL, "Access-Control-Request-Method: POST")),
        request_bytes(method="GET", path="/router/timeline", headers=upgrade),
        *(request_bytes(method="GET", path=page, headers=(EVIL,)) for page in PAGES),
        *(request_bytes(method="GET", path=page, headers=IMAGE) for page in PAGES),
    ]
    for attempt in attempts:
        answer = exchange(deployment.port, attempt)
        assert answer.status == 403, (attempt, answer)
        assert answer.error["code"] == "forbidden"
        assert "server.cors_origins" in answer.error["hint"]
        assert "access-control-allow-origin" not in answer.headers
    outcome(f"{len(attempts)} of {len(attempts)} refused")


@pytest.mark.attack(
    "a web page announces a body of 3 MB and does not send it",
    "403 at the headers, before a byte of the body",
)
def test_a_page_is_refused_at_the_headers(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{EVIL}\r\nContent-Length: 3000000\r\n\r\n"
    answer = exchange(deployment.port, head.encode())
    assert answer.status == 403
    assert answer.seconds < 3
    outcome(f"403 after {answer.seconds * 1e3:.0f} ms")


@pytest.mark.attack(
    "a web page calls the deployment under its own name (DNS rebinding), status ports too",
    "403 on every route; the message names server.allowed_hosts",
)
def test_a_rebound_name_is_refused(deployment: Cluster, outcome: Callable[[str], None]) -> None:
    host = f"evil.example:{deployment.port}"
    attempts = [request_bytes(BODY, host=host)]
    attempts += [request_bytes(method="GET", path=page, host=host) for page in PAGES]
    for attempt in attempts:
        answer = exchange(deployment.port, attempt)
        assert answer.status == 403, (attempt, answer)
        assert "server.allowed_hosts" in answer.error["message"]
    urls = status_urls(deployment)
    assert len(urls) >= 4
    for url in urls:
        port = urlsplit(url).port
        assert port
        for page in ("/health", "/metrics", "/live"):
            for request in (
                request_bytes(method="GET", path=page, host=host),
                request_bytes(method="GET", path=page, headers=(EVIL,)),
            ):
                assert exchange(port, request).status == 403, (url, request)
            request = request_bytes(method="GET", path=page, host=f"localhost:{port}")
            assert exchange(port, request).status == 200
    outcome(f"refused on {len(PAGES) + 1} routes and {len(urls)} status ports")


@pytest.mark.attack(
    "a page of this machine, a program without a content type, and a link from elsewhere call it",
    "they are served as before",
)
def test_local_pages_and_programs_are_served(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    local = "Origin: http://localhost:3000"
    answer = exchange(deployment.port, request_bytes(BODY, headers=(local,)))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    answer = exchange(deployment.port, request_bytes(BODY, headers=(local, "Content-Type: a/b")))
    assert answer.status == 415
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    curl = ("Content-Type: application/x-www-form-urlencoded",)
    data = json.dumps(BODY).encode()
    for host in ("localhost", "[::1]:80", socket.gethostname().partition(".")[0], "x"):
        answer = exchange(deployment.port, request_bytes(data, headers=curl, host=host))
        assert answer.status == 200, (host, answer)
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    request = request_bytes(method="GET", path="/health", headers=link)
    assert exchange(deployment.port, request).status == 200
    assert chat(deployment.port).status == 200
    outcome("served")


@pytest.mark.attack(
    "a page with a name of its own (DNS rebinding) calls a deployment that serves other hosts",
    "requests that send something are refused; the start warned that no key is set, once",
)
def test_a_deployment_for_other_hosts_warns_and_refuses_rebound_pages(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    flags = ("--http-host", "0.0.0.0")
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags) as cluster:
        host = f"evil.example:{cluster.port}"
        request = request_bytes(BODY, headers=(f"Origin: http://{host}",), host=host)
        assert exchange(cluster.port, request).status == 403
        assert exchange(cluster.port, request_bytes(BODY, host="llm.example.com")).status == 200
        assert cluster.log.count("server.api_keys") == 1
    outcome("403, warned once")
