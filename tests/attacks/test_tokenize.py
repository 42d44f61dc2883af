"""/tokenize and /detokenize get more than they can use."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.attacks.client import bystanders, chat, exchange, request_bytes
from tests.faults.cluster import Cluster

CONTEXT_TOKENS = 8192


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.attack(
    "/tokenize and /detokenize of megabytes, in 20 requests",
    "refused before work; streams go on; the frontend's memory does not grow",
)
def test_more_than_the_context_is_refused(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    texts = ["word " * 400_000, "a" * 2_000_000, " " * 60_000, "<|im_start|" * 100_000]
    bodies = [("/tokenize", {"model": "tiny", "prompt": text}) for text in texts]
    message = {"role": "user", "content": texts[0]}
    bodies.append(("/tokenize", {"model": "tiny", "messages": [message]}))
    bodies.append(("/detokenize", {"model": "tiny", "tokens": [65] * (CONTEXT_TOKENS + 1)}))
    requests = [request_bytes(dict(body), path) for path, body in bodies]
    slowest = 0.0
    with bystanders(deployment) as seen:
        for request in requests * 3:
            answer = exchange(deployment.port, request)
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            slowest = max(slowest, answer.seconds)
    assert seen.errors == []
    assert slowest < 3
    assert seen.longest_gap_s < 2
    assert seen.longest_live_s < 2
    assert seen.worst_growth_mb < 64
    body = {"model": "tiny", "tokens": [65] * CONTEXT_TOKENS}
    assert exchange(deployment.port, request_bytes(body, "/detokenize")).status == 200
    outcome(
        f"400 within {slowest * 1e3:.0f} ms, longest gap {seen.longest_gap_s * 1e3:.0f} ms, "
        f"+{seen.worst_growth_mb:.0f} MB"
    )


@pytest.mark.attack(
    "100 clients send texts of 40 kB to /tokenize and leave",
    "the frontend does not compute on for them",
)
def test_work_ends_when_the_client_leaves(
    deployment: Cluster, outcome: Callable[[str], None]
) -> None:
    pid = deployment.processes("frontend")[0].pid
    data = json.dumps({"model": "tiny", "prompt": "word and " * 4_500}).encode()
    request = request_bytes(data, "/tokenize")
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", deployment.port), timeout=20) as client:
            client.sendall(request)
    assert chat(deployment.port).status == 200
    time.sleep(0.3)
    began = cpu_s(pid)
    time.sleep(1)
    busy = cpu_s(pid) - began
    assert busy < 0.5
    outcome(f"{busy:.2f} s of CPU in the next second")
