"""Attacks planes as another user of the host. Run by root: PORT,... -> one JSON object.

The ports of all processes are readable by everybody in /proc/net/tcp. A hello tells which of them
are planes, and the incarnation of their process.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - the other user may not read the interpreter's files
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from dynamo.communication.events.protocol import FOLLOW, pack_position
from dynamo.communication.frames import HEADER, HELLO, FrameSplitter, pack_frame
from dynamo.communication.handshake import decode_hello, pack_hello
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.codec import decode_request, encode_request, pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.disaggregation.messages import PrefillRequest, encode_prefill_request

NOBODY = 65534
ENDPOINTS = ("generate", "prefill", "set_role", "kv_blocks", "clear_kv_blocks")


def probe(port: int) -> tuple[str, str]:
    """Return plane and incarnation of the process that listens at a port, or two empty strings."""
    for plane in ("requests", "events"):
        with (
            suppress(OSError, DynamoError, IndexError),
            socket.create_connection(("127.0.0.1", port), timeout=2) as connection,
        ):
            connection.sendall(pack_hello(plane))
            kind, _, body = FrameSplitter().feed(connection.recv(4096))[0]
            return plane, decode_hello(kind, body, plane).incarnation
    return "", ""


def follow_events(port: int) -> list[int]:
    """Follow all sources of a process without a proof. Returns the kinds of the frames received."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        frames = b"".join(pack_position(FOLLOW, number, -1) for number in range(8))
        connection.sendall(pack_hello("events", nonce=b"n" * 16) + frames)
        received = b""
        with suppress(OSError):
            while part := connection.recv(1 << 16):
                received += part
    return [kind for kind, _, _ in FrameSplitter().feed(received)]


def send_nested_hello(port: int) -> bytes:
    """Send a deeply nested hello and return what comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(pack_frame(HELLO, b"\x81\xa1z" + b"\x91" * 10_000))
        with suppress(ConnectionError):
            return connection.recv(HEADER.size)
    return b""


def ask_for_memory() -> list[tuple[str, int]]:
    """Ask each process of the host for its KV memory. Returns its answer and the passed files."""
    rows = Path("/proc/net/unix").read_text().splitlines()
    names = {row.split()[-1][1:] for row in rows if " @dynamo-transfer-" in row}
    answers = []
    for name in sorted(names):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(f"\0{name}")
            with suppress(OSError):
                connection.sendall(pack_hello("transfer", nonce=b"n" * 16))
            received, files = b"", []
            with suppress(ConnectionError):
                received, files, _, _ = socket.recv_fds(connection, 4096, 4)
            answers.append((received.hex(), len(files)))
    return answers


async def call_all(addresses: list[str]) -> list[str]:
    """Call the endpoints of each worker. Returns the outcome of each call."""
    plane = await TcpRequests.open("tcp:")
    params = SamplingParams(seed=1), StopConditions(max_tokens=2)
    request = encode_request(GenerateRequest("intruder", "tiny", pack_ids([1, 2, 3]), *params))
    prefill = encode_prefill_request(PrefillRequest(decode_request(request)))
    payloads = {"generate": request, "prefill": prefill, "set_role": b"prefill"}
    outcomes = []
    for address in addresses:
        for endpoint in ENDPOINTS:
            context = Context("intruder", timeout_s=5)
            payload = payloads.get(endpoint, b"")
            name = f"dynamo.worker.{endpoint}"
            try:
                await plane.call(address, name, payload, context, lambda _: True)
                outcomes.append("answered")
            except DynamoError as error:
                outcomes.append(error.message)
    await plane.close()
    return outcomes


def main() -> None:
    """Become another user and attack."""
    ports = [int(port) for port in sys.argv[1].split(",")]
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    planes = {port: probe(port) for port in ports}
    requests = [port for port, (plane, _) in planes.items() if plane == "requests"]
    events = [port for port, (plane, _) in planes.items() if plane == "events"]
    addresses = [f"tcp://127.0.0.1:{port}/{planes[port][1]}" for port in requests]
    result = {
        "uid": os.getuid(),
        "calls": asyncio.run(call_all(addresses)),
        "events": [follow_events(port) for port in events],
        "memory": ask_for_memory(),
        "nested": [send_nested_hello(port).hex() for port in requests + events],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
