"""Measure the CPU of both ends per request and per event of 200 bytes, for each plane.

    benchmarks/planes.py [--requests 20000] [--events 100000]

Two processes with uvloop make 64 calls at a time. Events come in batches of 32, as a worker's step
makes them. The CPU of the NATS server is reported separately.
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
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions, TlsFiles
from dynamo.communication.requests import ResponseWriter, open_requests
from dynamo.core.context import Context
from dynamo.core.tasks import run_all

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.certificates import make_authority, make_certificate
from tests.support.servers import EtcdProcess, NatsProcess

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
    """Run the remote process, which answers calls and publishes events on request."""
    place = await open_discovery(directory)
    requests = await open_requests(url, options)
    events = await open_events(url, place, options)
    source = await events.open_source("bench/worker/kv", "w")

    async def echo(payload: bytes, out: ResponseWriter) -> None:
        out.send(payload)

    async def publish(payload: bytes, out: ResponseWriter) -> None:
        for _ in range(int(payload) // STEP):
            for _ in range(STEP):
                source.publish(PAYLOAD)
            await asyncio.sleep(0)
        out.send(b"done")

    async def used(_: bytes, out: ResponseWriter) -> None:
        out.send(str(cpu_s()).encode())

    for name, handler in (("echo", echo), ("publish", publish), ("cpu", used)):
        await requests.serve(name, handler)
    while requests.connection_error or events.connection_error:
        await asyncio.sleep(0.01)
    print(requests.address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class Bench:
    """Two processes over one plane. `nats` is the pid of the server, 0 for none."""

    def __init__(self, url: str, directory: str, options: PlaneOptions, nats: int) -> None:
        self._where = (url, directory, options)
        self._nats = nats
        self._heard = 0
        self._burst = asyncio.Event()

    async def run(self, requests: int, events: int) -> dict[str, float]:
        """Measure once. The caller computes medians."""
        url, directory, options = self._where
        command = [sys.executable, __file__, "--serve", url, directory]
        child = subprocess.Popen(
            [*command, json.dumps(plain(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdin is not None
        self._address = (await asyncio.to_thread(child.stdout.readline)).strip()
        place = await open_discovery(directory)
        self._requests = await open_requests(url, options)
        plane = await open_events(url, place, options)
        await plane.subscribe("bench", self._listen)
        await self._several(200)
        metrics = await self._calls(requests) | await self._events(events)
        metrics["lost"] = float(plane.count_lost_events())
        child.stdin.close()
        await asyncio.to_thread(child.wait)
        for plane_object in (plane, self._requests, place):
            await plane_object.close()
        return metrics

    async def _calls(self, count: int) -> dict[str, float]:
        each = count // AT_ONCE
        before, started = await self._spent(), time.monotonic()
        await run_all(*(self._several(each) for _ in range(AT_ONCE)))
        ends, server = self._since(before, await self._spent(), each * AT_ONCE)
        rate = each * AT_ONCE / (time.monotonic() - started)
        return {"request_us": ends, "request_server_us": server, "requests_per_s": rate}

    async def _events(self, count: int) -> dict[str, float]:
        before = await self._spent()
        self._heard = 0
        for _ in range(count // BURST):
            self._burst.clear()
            await self._ask("publish", str(BURST).encode())
            await asyncio.wait_for(self._burst.wait(), 60)
        ends, server = self._since(before, await self._spent(), count // BURST * BURST)
        return {"event_us": ends, "event_server_us": server}

    def _listen(self, _: object) -> None:
        self._heard += 1
        if not self._heard % BURST:
            self._burst.set()

    async def _several(self, count: int) -> None:
        for _ in range(count):
            await self._ask("echo", PAYLOAD)

    async def _ask(self, name: str, payload: bytes = b"") -> bytes:
        got: list[bytes] = []
        take = got.append
        await self._requests.call(
            self._address, name, payload, Context("bench"), lambda item: not take(item)
        )
        return got[-1]

    async def _spent(self) -> tuple[float, float]:
        """Return the CPU of both ends, and of the server."""
        server = cpu_of(self._nats) if self._nats else 0.0
        return cpu_s() + float(await self._ask("cpu")), server

    def _since(
        self, before: tuple[float, float], now: tuple[float, float], count: int
    ) -> tuple[float, float]:
        return (now[0] - before[0]) / count * 1e6, (now[1] - before[1]) / count * 1e6


async def run_one(
    url: str, directory: str, options: PlaneOptions, nats: int, args: argparse.Namespace
) -> dict[str, float]:
    return await Bench(url, directory, options, nats).run(args.requests, args.events)


def plain(options: PlaneOptions) -> dict[str, object]:
    tls = options.tls
    return {"secret": options.secret, "tls": [tls.ca, tls.cert, tls.key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=96_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=3)
    args = parser.parse_args()
    if args.serve:
        url, directory, text = args.serve
        measured = json.loads(text)
        options = PlaneOptions(secret=measured["secret"], tls=TlsFiles(*measured["tls"]))
        uvloop.run(serve(url, directory, options))
        return
    folder = Path(tempfile.mkdtemp())
    make_authority(folder)
    tls = PlaneOptions(tls=make_certificate(folder, "node"))
    with EtcdProcess() as etcd, NatsProcess() as nats:
        pid = nats.pid
        planes = {
            "tcp": ("tcp:", DEFAULT_OPTIONS, 0),
            "tcp, secret": ("tcp:", PlaneOptions(secret="0123456789abcdef"), 0),
            "tcp, TLS": ("tcp:", tls, 0),
            "nats": (nats.url, DEFAULT_OPTIONS, pid),
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in planes}
        for _ in range(args.rounds):
            for name, (url, options, server) in planes.items():
                directory = f"{etcd.url}/bench-{next(_places)}"
                work = run_one(url, directory, options, server, args)
                rounds[name].append(uvloop.run(work))
    for name, runs in rounds.items():
        shown = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
        print(name, shown)


if __name__ == "__main__":
    main()
