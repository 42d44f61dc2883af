"""The model store against a hub of its own, with processes that share nothing but discovery.

python benchmarks/model_store.py                    all, with 500 MB of files
python benchmarks/model_store.py --mb 100 eight     one part
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from msgspec.structs import replace
from tests.support.fake_hub import FakeHub, running_hub
from tests.unit.model_store.swarm import LINK, Swarm

from dynamo.core.settings import Settings
from dynamo.models.downloads.sources import ModelSpec
from dynamo.models.shelf.manifest import PIECE_BYTES
from dynamo.models.shelf.shelf import Shelf
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process import run_on_loop
from dynamo.services.model_store.download import fetch_model
from dynamo.services.model_store.store import ModelStore

SPEC = ModelSpec("org/model")
TICK_S = 0.002


async def run_process(root: Path, name: str, mode: str) -> None:
    """Fetch the model to a shelf of this process, print the seconds, and serve it until stdin ends.

    `mode`: reader, or keeper; damaged, hanging and dying ones serve so.
    """
    settings = Settings()
    runtime_settings = replace(settings.runtime, discovery=f"file:{root / 'discovery'}")
    runtime = await DistributedRuntime.create(
        replace(settings, runtime=runtime_settings), name=name
    )
    shelf = root / name
    shelf.mkdir(exist_ok=True)
    store = ModelStore(runtime, Shelf(shelf))
    await store.start()
    await asyncio.sleep(0.3)  # others are seen
    began, cpu, loop_cpu = time.monotonic(), time.process_time(), time.thread_time()
    started = False

    def progress(_: str, done: int, __: int) -> None:
        nonlocal started
        if done and not started:
            started = True
            print("started", flush=True)

    left_out: list[str] = []
    reasons = logging.Handler(logging.WARNING)
    reasons.emit = lambda record: left_out.append(record.fields["reason"])  # type: ignore[method-assign,attr-defined]
    logging.getLogger("dynamo.services.model_store.download").addHandler(reasons)
    model = await fetch_model(store, SPEC, progress)
    spoil(store, mode)
    answer: dict[str, Any] = {"s": time.monotonic() - began, "cpu": time.process_time() - cpu}
    answer |= {"loop_cpu": time.thread_time() - loop_cpu, "left_out": left_out}
    print(json.dumps(answer | {"sound": not shelf_damage(model)}), flush=True)
    waiting = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    print(json.dumps(await measure_lag(store, waiting)), flush=True)
    await runtime.shutdown(0)


async def measure_lag(store: ModelStore, ending: asyncio.Future[str]) -> dict[str, float]:
    """Return the 99th percentile of the loop's lag in ms, while pieces are served and otherwise."""
    lags: dict[bool, list[float]] = {False: [], True: []}
    while not ending.done():
        before, sent_bytes = time.monotonic(), store.server.sent_bytes
        await asyncio.sleep(TICK_S)
        lag = 1000 * (time.monotonic() - before - TICK_S)
        lags[store.server.sent_bytes != sent_bytes].append(lag)
    idle, serving = (sorted(each or [0.0])[len(each) * 99 // 100] for each in lags.values())
    return {"idle_ms": idle, "serving_ms": serving}


def shelf_damage(model: Any) -> list[str]:
    """Return the damaged files of a model."""
    return Shelf().verify(model)


def spoil(store: ModelStore, mode: str) -> None:
    """Let a process serve damaged pieces, none at all, or die at the first one."""
    (offer,) = store.server.models.values()
    read = offer.read

    async def hang(*_: Any) -> None:
        await asyncio.sleep(1000)

    def die(_: int) -> bytes:
        os._exit(1)

    if mode == "damaged":
        offer.read = lambda number: b"x" + read(number)[1:]
    elif mode == "hanging":
        store.server._send_piece = hang  # type: ignore[method-assign]  # noqa: SLF001
    elif mode == "dying":
        offer.read = die


def cpu_s(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bench:
    """A hub with one model, and the processes of a part."""

    def __init__(self, hub: FakeHub, root: Path, size: int) -> None:
        self.hub, self.root, self.size = hub, root, size

    def start(self, name: str, mode: str = "reader", **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "process", str(self.root), name, mode]
        environment = os.environ | {"HF_ENDPOINT": self.hub.url} | environ
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def result(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                assert answer.get("sound", True)
                return answer
        raise AssertionError("a process ended without the model")

    def end(self, *processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
        answers = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            if process.poll() is None:
                answers.append(self.result(process))
            process.wait()
        return answers

    def offline(self, name: str, mode: str = "reader") -> subprocess.Popen[str]:
        return self.start(name, mode, HF_HUB_OFFLINE="1")

    def eight(self) -> None:
        """Eight processes that ask at once."""
        processes = [self.start(f"p{number}") for number in range(8)]
        seconds = [self.result(process)["s"] for process in processes]
        ratio = self.hub.sent_bytes / self.size
        print(f"eight at once: {ratio:.3f} of the bytes from the hub, {max(seconds):.1f} s")
        self.end(*processes)

    def kills(self) -> None:
        """A process that is killed at half, and one that is killed ten times."""
        for count, shares in (("once", [0.5]), ("ten times", [n / 11 for n in range(1, 11)])):
            cache = self.root / count
            environ = os.environ | {"HF_ENDPOINT": self.hub.url, "XDG_CACHE_HOME": str(cache)}
            command = [sys.executable, "-m", "dynamo", "pull", SPEC.name]
            self.hub.sent_bytes, self.hub.rate = 0, 100_000_000
            for share in shares:
                process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
                while self.hub.sent_bytes < share * self.size and process.poll() is None:
                    time.sleep(0.002)
                process.kill()
                process.wait()
            before, self.hub.rate = self.hub.sent_bytes, 0
            subprocess.run(command, env=environ, check=True, capture_output=True)
            again = (self.hub.sent_bytes - before) / self.size
            whole = self.hub.sent_bytes / self.size
            print(f"killed {count}: {again:.3f} of the bytes after it, {whole:.3f} in all")
            shutil.rmtree(cache)

    def rate(self) -> None:
        """The rate of one peer on loopback, and the CPU seconds for each GB at both ends."""
        peer = self.start("peer", "keeper")
        self.result(peer)
        for number in range(3):
            before = cpu_s(peer)
            answer = self._read_once(f"reader-{number}")
            gigabytes = self.size / 1e9
            print(
                f"one peer: {gigabytes / answer['s']:.2f} GB/s; CPU seconds for each GB: "
                f"reader {answer['cpu'] / gigabytes:.2f}, {answer['loop_cpu'] / gigabytes:.2f} of "
                f"them in its event loop, "
                f"peer {(cpu_s(peer) - before) / gigabytes:.2f}"
            )
        (lag,) = self.end(peer)
        print(
            f"the peer's event loop: p99 of its lag {lag['serving_ms']:.1f} ms while it serves, "
            f"{lag['idle_ms']:.1f} ms otherwise"
        )

    def peers(self) -> None:
        """Readers of a sound peer, then of a damaged, a hanging and a dying one beside it."""
        sound = self.start("sound", "keeper")
        self.result(sound)
        factors, modes = [], ("damaged", "hanging", "dying")
        for _ in range(3):
            alone = self._read_once("alone")["s"]
            others = [self.offline(mode, mode) for mode in modes]
            for process in others:
                self.result(process)
            answer = self._read_once("reader")
            factors.append(answer["s"] / alone)
            for process, mode in zip(others, modes, strict=True):
                process.kill()
                process.wait()
                shutil.rmtree(self.root / mode)
            reasons = "; ".join(answer["left_out"])
            print(f"four peers, three of them bad: {factors[-1]:.2f} of the time of the sound one")
            print(f"  left out: {reasons}")
        self.end(sound)
        print(f"median {statistics.median(factors):.2f}")

    def _read_once(self, name: str) -> dict[str, Any]:
        """Return the answer of a reader with an empty shelf and without a hub."""
        reader = self.offline(name)
        answer = self.result(reader)
        self.end(reader)
        shutil.rmtree(self.root / name)
        return answer

    def readers(self) -> None:
        """Twenty readers that are killed midway, and one more."""
        keeper = self.start("keeper", "keeper")
        self.result(keeper)
        seconds = []
        for number in range(22):
            reader = self.offline(f"r{number}")
            if 0 < number < 21:
                assert reader.stdout is not None
                reader.stdout.readline()
                reader.kill()
                reader.wait()
            else:
                seconds.append(self.result(reader)["s"])
                self.end(reader)
            shutil.rmtree(self.root / f"r{number}")
        print(f"readers: the first {seconds[0]:.2f} s, the last behind 20 dead {seconds[1]:.2f} s")
        self.end(keeper)

    def sixteen(self) -> None:
        """Sixteen at once in virtual time."""
        pieces = -(-self.size // PIECE_BYTES)
        alone_s = pieces * PIECE_BYTES / LINK
        factors = [Swarm(16, pieces, PIECE_BYTES, seed).run() / alone_s for seed in range(3)]
        print(f"sixteen at once, virtual time: {', '.join(f'{x:.2f}' for x in factors)} of one")

    def starts(self) -> None:
        """A second start with everything on the shelf, without a hub."""
        process = self.start("again", "keeper")
        self.result(process)
        self.end(process)
        cpu = []
        for _ in range(3):
            process = self.start("again", "keeper", HF_ENDPOINT="http://127.0.0.1:1")
            cpu.append(1000 * self.result(process)["cpu"])
            self.end(process)
        print(f"a start with all on the shelf: {min(cpu):.1f} ms of CPU, no network")


@contextmanager
def running_bench(size: int) -> Iterator[Bench]:
    """Yield a bench with a hub of `size` bytes in three files."""
    content = Random(0).randbytes(size // 2)
    files = {"config.json": b"{}", "tokenizer.json": b"{}"}
    for number in (1, 2):
        files[f"model-{number}.safetensors"] = content
    with running_hub({SPEC.name: files}) as hub, tempfile.TemporaryDirectory() as folder:
        yield Bench(hub, Path(folder), size)


PARTS = ("rate", "eight", "kills", "peers", "readers", "sixteen", "starts")


def main() -> None:
    if sys.argv[1:2] == ["process"]:
        run_on_loop(run_process(Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--mb", type=int, default=500)
    args = parser.parse_args()
    for part in args.parts or PARTS:
        with running_bench(args.mb * 1_000_000) as bench:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
