"""Requests that try to make a series of metrics each, and the count of series."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from random import Random

from tests.faults.cluster import Cluster

ROLES = ("frontend", "observer", "worker")
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/score", "/tokenize",
)  # fmt: skip


def make_request(rng: Random, model: str) -> bytes:
    """Return a request with names that no other one has. Of fifty, a request is answered with text."""
    name = f"{rng.getrandbits(64):x}"
    strange = rng.choice((name, f'{name}"}} 1\\n', f"{name}%0a", "ü" + name, name * 20))
    method, path = "POST", rng.choice(PATHS)
    body = {"model": f"{model}-{strange}", "messages": [], "prompt": strange, "user": strange}
    match rng.randrange(50):
        case 0:
            body = {"model": model, "prompt": name, "max_tokens": 1, "user": strange}
            path = "/v1/completions"
        case kind if kind < 12:
            path = f"/{rng.choice(('v1/', '', 'metrics/', 'v1/responses/'))}{name}?a={name}"
            method = rng.choice(("GET", "POST", "DELETE", "PUT", "OPTIONS"))
        case kind if kind < 18:
            body["model"] = model
            body[f"field_{name}"] = name
            body["temperature"] = -1
    data = json.dumps(body).encode()
    head = [
        f"{method} {path} HTTP/1.1",
        f"host: {rng.choice(('localhost', '127.0.0.1'))}",
        "content-type: application/json",
        f"content-length: {len(data)}",
        f"x-request-id: {strange}",
        f"user-agent: {strange}",
        f"x-session-id: {strange}",
        f"traceparent: 00-{rng.getrandbits(128):032x}-{rng.getrandbits(64):016x}-01",
        f"tracestate: a={name}",
        f"x-{name}: {name}",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


async def send_hostile(port: int, model: str, number: int, seed: int, at_once: int = 8) -> int:
    """Send so many requests. Returns how many were answered."""
    rng = Random(seed)
    requests = iter([make_request(rng, model) for _ in range(number)])
    answers = await asyncio.gather(*(_send(port, requests) for _ in range(at_once)))
    return sum(answers)


async def _send(port: int, requests: Iterator[bytes]) -> int:
    answered, writer = 0, None
    for request in requests:
        if writer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if (length := LENGTH.search(head)) is not None:
                await reader.readexactly(int(length[1]))
            elif b" 204 " not in head[:16]:
                await reader.readuntil(b"0\r\n\r\n")
            answered += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            head = b"connection: close"
        if b"connection: close" in head.lower():
            writer.close()
            writer = None
    if writer is not None:
        writer.close()
    return answered


def count_series(cluster: Cluster) -> int:
    """Return the number of series that all processes have."""
    count = 0
    for role in ROLES:
        for record in cluster.ready(role):
            with urllib.request.urlopen(f"{record.status_url}/metrics", timeout=30) as page:
                count += sum(line[:1] not in (b"#", b"") for line in page.read().splitlines())
    return count
