"""CPU of both ends, per request and per event of 200 bytes, over each plane.

    benchmarks/planes.py [--requests 20000] [--events 100000]

Two processes, 64 calls at a time; events in batches of 32, as a worker's step makes them. The
server's CPU (NATS) is told apart. uvloop, as processes use it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from dynamo.communication.discovery import open_discovery
from dynamo.communication.events import open_events
from dynamo.communication.options import DEFAULT, PlaneOptions, Tls
from dynamo.communication.requests import Outgoing, open_requests
from dynamo.core.context import Context
from dynamo.core.tasks import run_all
from dynamo.testing.certificates import make_authority, make_certificate
from dynamo.testing.servers import EtcdProcess, NatsProcess

PAYLOAD = b"x" * 200
AT_ONCE = 64
STEP = 32
BURST = 9_600
"""Fewer than a source keeps for who falls behind."""
_places = itertools.count()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def serve(url: str, directory: str, options: PlaneOptions) -> None:
    """The far end: answers calls, publishes events when asked to."""
    place = await open_discovery(directory)
    requests = await open_requests(url, options)
    events = await open_events(url, place, options)
    source = await events.source("bench/worker/kv", "w")

    async def echo(payload: bytes, out: Outgoing) -> None:
        out.send(payload)

    async def publish(payload: bytes, out: Outgoing) -> None:
        for _ in range(int(payload) // STEP):
            for _ in range(STEP):
                source.publish(PAYLOAD)
            await asyncio.sleep(0)
        out.send(b"done")

    async def used(_: bytes, out: Outgoing) -> None:
        out.send(str(cpu_s()).encode())

    for name, handler in (("echo", echo), ("publish", publish), ("cpu", used)):
        await requests.serve(name, handler)
    while requests.trouble or events.trouble:
        await asyncio.sleep(0.01)
    print(requests.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def measure(
    url: str, directory: str, options: PlaneOptions, about: argparse.Namespace, nats: int
) -> dict[str, float]:
    place = await open_discovery(directory)
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", url, directory, json.dumps(plain(options))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    address = (await asyncio.to_thread(child.stdout.readline)).strip()
    requests = await open_requests(url, options)
    events = await open_events(url, place, options)
    context = Context("bench")

    async def ask(name: str, payload: bytes = b"") -> bytes:
        got: list[bytes] = []
        await requests.call(address, name, payload, context, lambda item: not got.append(item))
        return got[-1]

    async def spent() -> float:
        return cpu_s() + float(await ask("cpu"))

    async def several(count: int) -> None:
        for _ in range(count):
            await ask("echo", PAYLOAD)

    heard = 0
    done = asyncio.Event()

    def listen(_: object) -> None:
        nonlocal heard
        heard += 1
        if not heard % BURST:
            done.set()

    await events.subscribe("bench", listen)
    await several(200)
    found: dict[str, float] = {}
    before, server = await spent(), cpu_of(nats) if nats else 0.0
    started = time.monotonic()
    each = about.requests // AT_ONCE
    await run_all(*(several(each) for _ in range(AT_ONCE)))
    found["request_us"] = (await spent() - before) / (each * AT_ONCE) * 1e6
    found["requests_per_s"] = each * AT_ONCE / (time.monotonic() - started)
    found["request_server_us"] = ((cpu_of(nats) if nats else 0) - server) / about.requests * 1e6
    before, server = await spent(), cpu_of(nats) if nats else 0.0
    heard = 0
    for _ in range(about.events // BURST):
        done.clear()
        await ask("publish", str(BURST).encode())
        await asyncio.wait_for(done.wait(), 60)
    found["event_us"] = (await spent() - before) / about.events * 1e6
    found["event_server_us"] = ((cpu_of(nats) if nats else 0) - server) / about.events * 1e6
    found["lost"] = float(events.lost())
    assert child.stdin is not None
    child.stdin.close()
    await asyncio.to_thread(child.wait)
    await events.close()
    await requests.close()
    await place.close()
    return found


def plain(options: PlaneOptions) -> dict[str, object]:
    tls = options.tls
    return {"secret": options.secret, "tls": [tls.ca, tls.cert, tls.key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=96_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=3)
    about = parser.parse_args()
    if about.serve:
        url, directory, text = about.serve
        told = json.loads(text)
        options = PlaneOptions(secret=told["secret"], tls=Tls(*told["tls"]))
        uvloop.run(serve(url, directory, options))
        return
    folder = Path(tempfile.mkdtemp())
    make_authority(folder)
    tls = PlaneOptions(tls=make_certificate(folder, "node"))
    with EtcdProcess() as etcd, NatsProcess() as nats:
        pid = nats.pid
        planes = {
            "tcp": ("tcp:", DEFAULT, 0),
            "tcp, secret": ("tcp:", PlaneOptions(secret="0123456789abcdef"), 0),
            "tcp, TLS": ("tcp:", tls, 0),
            "nats": (nats.url, DEFAULT, pid),
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in planes}
        for _ in range(about.rounds):
            for name, (url, options, server) in planes.items():
                directory = f"{etcd.url}/bench-{next(_places)}"
                work = measure(url, directory, options, about, server)
                rounds[name].append(uvloop.run(work))
    for name, found in rounds.items():
        shown = {key: round(statistics.median(one[key] for one in found), 1) for key in found[0]}
        print(name, shown)


if __name__ == "__main__":
    main()
