"""Bodies that stop the event loop or fill the memory of a frontend."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.attacks.client import (
    CHAT,
    COMPLETIONS,
    bystanders,
    chat,
    exchange,
    request_bytes,
    rss_mb,
)
from tests.faults.cluster import Cluster

MB = 1_000_000
BODY_MB = 30
LONGEST_WAIT_S = 2.0
"""The bar is 0.25 s on a quiet machine. Tests run beside others."""
LONGEST_ANSWER_S = 8.0
"""The bar is 2 s."""
HEAD = '{"model":"tiny","max_tokens":1,'
TURN = '"messages":[{"role":"user","content":'


def repeated(before: str, unit: str, after: str) -> bytes:
    """Return a body of 30 MB."""
    return (before + unit * (BODY_MB * MB // len(unit)) + unit.rstrip(",") + after).encode()


BODIES = {
    "empty messages": (CHAT, HEAD + '"messages":[', "{},", "]}", 413),
    "empty parts of one message": (CHAT, HEAD + TURN + "[", '"",', "]}]}", 413),
    "prompts of one token": (COMPLETIONS, HEAD + '"prompt":[', "[1],", "]}", 413),
    "one prompt of token ids": (COMPLETIONS, HEAD + '"prompt":[', "7,", "]}", 413),
    "an unused field with lists": (COMPLETIONS, HEAD + '"prompt":"a","zz":[', "[],", "]}", 413),
    "one text of letters": (CHAT, HEAD + TURN + '"', "a", '"}]}', 400),
    "one text of words": (CHAT, HEAD + TURN + '"', "ab cd ", '"}]}', 400),
    "a text of escapes": (CHAT, HEAD + TURN + '"', "\\u005b", '"}]}', 400),
}


@pytest.fixture(scope="module")
def roomy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A deployment whose operator allows bodies of 32 MB and 2 s without progress."""
    flags = ("--server.max_body_bytes", "32MB", "--server.header_timeout", "2")
    folder = tmp_path_factory.mktemp("roomy")
    with Cluster(tiny_model, folder, workers=1, flags=flags) as cluster:
        yield cluster


@pytest.mark.attack(
    "Bodies of 30 MB hold millions of messages, parts, prompts or ids, or one long text",
    "others wait under 0.25 s, the answer comes within 2 s, also where 32 MB are allowed",
)
def test_one_body_never_stops_the_loop(
    deployment: Cluster, roomy: Cluster, outcome: Callable[[str], None]
) -> None:
    waits, answers = [0.0], [0.0]
    for name, (path, before, unit, after, status) in BODIES.items():
        data = request_bytes(repeated(before, unit, after), path)
        refused = exchange(deployment.port, data)
        assert refused.status == 413, name
        assert "limit of 4194304 bytes" in refused.error["message"]
        with bystanders(roomy) as seen:
            answer = exchange(roomy.port, data, 60)
        assert answer.status == status, (name, answer.body)
        assert seen.errors == [], name
        assert seen.longest_live_s < LONGEST_WAIT_S, name
        assert seen.worst_growth_mb < 4 * BODY_MB + 64, name
        assert answer.seconds < LONGEST_ANSWER_S, name
        waits.append(seen.longest_live_s)
        answers.append(answer.seconds)
    assert chat(deployment.port).status == chat(roomy.port).status == 200
    outcome(f"refused; longest wait {max(waits):.2f} s, longest answer {max(answers):.1f} s")


def send_unfinished(port: int, size: int, stack: ExitStack) -> socket.socket:
    """Send all but the last bytes of a body, or as much as the server takes."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size + 999}\r\n\r\n"
    with suppress(ConnectionError):
        connection.sendall(head.encode() + b"x" * size)
    return connection


@pytest.mark.attack(
    "100 connections each send 4 MB of a body and never its end",
    "the frontend grows by less than 300 MB, further bodies are 503, normal requests go on",
)
def test_unfinished_bodies_share_a_budget(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    (frontend,) = deployment.processes("frontend")
    before = rss_mb(frontend.pid)
    with ExitStack() as stack:
        connections = [send_unfinished(deployment.port, 4 * MB, stack) for _ in range(100)]
        growth = rss_mb(frontend.pid) - before
        answers = []
        for connection in connections:
            connection.settimeout(0.01)
            with suppress(TimeoutError, ConnectionError):
                answers.append(connection.recv(1 << 16))
        assert growth < 300
        assert answers
        for refused in answers:
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: " in refused
            assert b"x-request-id: " in refused
        assert chat(deployment.port).status == 200
        long = {"role": "user", "content": "ab cd " * 20}
        assert chat(deployment.port, messages=[long] * 50).status in (200, 400)
    outcome(f"+ {growth:.0f} MB, {len(answers)} of 100 refused, normal requests answered")


@pytest.mark.attack(
    "A client without the API key sends the headers of a request with a large body",
    "401 before a byte of the body is received",
)
def test_a_key_is_checked_before_the_body(
    tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    flags = ("--server.api_keys", "sesame")
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags) as cluster:
        head = request_bytes(b"x" * MB)[:-MB]
        for key, status in (("", 401), ("Authorization: Bearer wrong\r\n", 401)):
            answer = exchange(cluster.port, head[:-2] + key.encode() + b"\r\n", 10)
            assert answer.status == status
            assert answer.headers["connection"] == "close"
            assert answer.headers["x-request-id"]
        assert chat(cluster.port).status == 401
    outcome("401 without the body, the connection closes")


@pytest.mark.attack(
    "A client sends 20 MB of a body at once and then one byte after another",
    "408 after the header timeout, and the memory is free",
)
def test_a_burst_buys_no_time(roomy: Cluster, outcome: Callable[[str], None]) -> None:
    (frontend,) = roomy.processes("frontend")
    before = rss_mb(frontend.pid)
    with ExitStack() as stack:
        connection = send_unfinished(roomy.port, 20 * MB, stack)
        connection.settimeout(0.2)
        answer = b""
        for _ in range(40):
            with suppress(TimeoutError):
                answer = connection.recv(1 << 16)
                break
            connection.sendall(b"x")
        assert answer.startswith(b"HTTP/1.1 408 ")
        growth = rss_mb(frontend.pid) - before
        assert growth < 15
    assert chat(roomy.port).status == 200
    outcome("408, the connection closes, the memory is free")
