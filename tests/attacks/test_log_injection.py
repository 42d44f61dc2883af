"""Clients put terminal codes and line breaks into everything that is logged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.attacks.client import exchange, request_bytes
from tests.faults.cluster import Cluster
from tests.faults.stream_client import body_of

CODES = "\x1b[2J\x1b]0;owned\x07\r\t\x00\x9b31m\x85\u2028\u2029\u202e\u2066"
FORGED = "2026-01-01T00:00:00.000Z INFO  frontend forged: line"
PATHS = (
    "/%1b[2J%1b]0;owned%07",
    f"/a%0a{FORGED.replace(' ', '%20')}",
    "/%e2%80%a8%e2%80%ae%c2%9b31m%c2%85%ed%a0%80%ff",
    "/x\x80\x9b31m\x85",
)
TEXT_LINE = re.compile(r"(\w+ +\| )?(  |\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ )")


def attack(port: int) -> None:
    """Send hostile paths, ids, roles, models and methods."""
    text = CODES + "\n" + FORGED
    for path in PATHS:
        exchange(port, request_bytes(path=path, method="GET"))
    exchange(port, request_bytes(method="GET", path="/", headers=[f"x-request-id: a{CODES[:4]}b"]))
    body = body_of(0, 2, 1) | {"stream": False, "stream_options": None}
    role = {"role": text + "\ud800", "content": "a"}
    exchange(port, request_bytes(body | {"messages": [role, *body["messages"]]}))
    for fields in ({"model": text}, {"user": text}, {"cache_salt": text}, {"stop": [text, 1]}):
        exchange(port, request_bytes(body | fields))
    exchange(port, b"\x1b[31m\x07 /x HTTP/1.1\r\nHost: x\r\n\r\n")
    exchange(port, b"GET /last HTTP/1.1\r\nHost: x\r\nx-request-id: last\r\n\r\n")


@pytest.mark.attack(
    "Terminal codes and line breaks in paths, ids, roles and models, logged as text or JSON",
    "the log has only printable lines, each written by a process of ours",
)
@pytest.mark.parametrize("fmt", ["text", "json"])
def test_nothing_unprintable_reaches_the_log(
    fmt: str, tiny_model: Path, tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    """JSON lines stay valid JSON."""
    flags = ("--log-requests", "--server.unknown_roles", "warn", "--log-format", fmt)
    with Cluster(tiny_model, tmp_path, workers=1, flags=flags) as cluster:
        started = "end:  Ctrl-C" if fmt == "text" else "deployment serves"
        cluster.wait_blocking(lambda: started in cluster.log)
        first = len(cluster.log)
        attack(cluster.port)
        cluster.wait_blocking(lambda: "/last" in cluster.log)
        lines = cluster.log[first:].removesuffix("\n").split("\n")

    assert len(lines) >= 8
    assert all(line.isprintable() for line in lines)
    if fmt == "json":
        assert all(json.loads(line)["component"] == "frontend" for line in lines)
    else:
        bad = [line for line in lines if not TEXT_LINE.match(line) or " forged: line" in line[:80]]
        assert not bad
    outcome(f"{len(lines)} lines, all printable")
