"""The part of gpu.py with whole deployments, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_setup import ROOT, Bench, Skipped


class Deployment:
    """A running `dynamo run` of the small model in float32, whose texts can be compared."""

    def __init__(self, bench: Bench, name: str, *flags: str, blocks: int = 0) -> None:
        from servers import free_port

        port = free_port()
        self.url, self.name = f"http://127.0.0.1:{port}", f"http-{port}"
        self._log = bench.folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "dynamo", "run", "out=native", str(bench.model("qwen")), "--device", bench.device.type),
            *("--dtype", "float32", "--http-port", str(port), "--model-name", "m"),
            *("--num-blocks", str(blocks or bench.size(1200, 160)), "--threads", "1", *flags),
        ]  # fmt: skip
        path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path}
            )

    def __enter__(self) -> Deployment:  # noqa: PYI034
        end = time.monotonic() + 90
        while True:
            try:
                self.chat("Hi", 1)
                return self
            except (OSError, ValueError) as error:
                if self._child.poll() is None and time.monotonic() < end:
                    time.sleep(0.3)
                    continue
                self.__exit__()
                raise RuntimeError(
                    f"{error}; end of the log:\n{self._log.read_text()[-1500:]}"
                ) from None

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def chat(self, prompt: str, tokens: int, on_text: Callable[[], None] = lambda: None) -> str:
        """Return the text of a streamed answer."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        text = ""
        with urllib.request.urlopen(request, timeout=60) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(str(event["error"]))
                    text += "".join(
                        choice["delta"].get("content") or "" for choice in event["choices"]
                    )
                    on_text()
        return text

    def processes(self, role: str) -> list[Any]:
        """Return the records of the processes of a role."""
        from dynamo.runtime.deployment import live_processes

        return [
            each
            for each in live_processes()
            if each.deployment == self.name and each.role.endswith(role)
        ]

    def metric(self, name: str) -> float:
        """Return the sum of a metric over the workers."""
        total = 0.0
        for worker in self.processes("worker"):
            with urllib.request.urlopen(worker.status_url + "/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            total += sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith((name + " ", name + "{"))
            )
        return total


def part_live(bench: Bench) -> None:
    """Serve the small model by two workers, by roles apart, and with a tier."""
    prompt, text = "What is a card? " * bench.size(40, 4), ""
    with bench.step("live: two workers"), Deployment(bench, "two", "--workers", "2") as two:
        text = ask_two(bench, two, prompt)
    flags = ("--prefill-workers", "1", "--decode-workers", "1", "--workers", "0")
    flags += ("--max-num-batched-tokens", bench.size("8192", "512"))  # a prompt is one hand-over
    with (
        bench.step("live: roles apart on one device"),
        Deployment(bench, "roles", *flags, "--disagg", "always") as roles,
    ):
        wait_for_transfers(roles)
        check_text(roles.chat(prompt, 32), text)
        before = transfers(roles)
        roles.chat("a" * bench.size(8192, 400), 2)
        moved, took_s = (now - was for now, was in zip(transfers(roles), before, strict=True))
        assert moved, "no KV block moved"
        assert roles.metric('dynamo_transfer_bytes_total{backend="shm"}'), "blocks moved by TCP"
        least = 0.6 * bench.speeds["copy"] / 2
        bench.figure("hand-over between two workers", moved / took_s / 1e9, "GB/s", least=least)
    flags = ("--kv-host-size", bench.size("2GB", "64MB"), "--kv-offload-policy", "lru")
    with (
        bench.step("live: tiers"),
        Deployment(bench, "tiers", *flags, blocks=160) as tiers,
    ):
        check_text(tiers.chat(prompt, 32), text)
        for number in range(3):
            tiers.chat(f"{number} " * 500, 2)
        check_text(tiers.chat(prompt, 32), text)
        loaded = tiers.metric('dynamo_worker_tier_blocks_total{tier="host",change="loaded"}')
        assert loaded, "no block came from the tier"
    with bench.step("live: tensor parallel 2, and kill -9 of a rank"):
        ask_ranks(bench, prompt, text)


def transfers(roles: Deployment) -> list[float]:
    """Return the bytes of KV blocks that moved between workers, and the seconds."""
    return [roles.metric(f"dynamo_transfer_{name}") for name in ("bytes_total", "seconds_sum")]


def wait_for_transfers(roles: Deployment) -> None:
    """Ask until a prompt's blocks come from the prefill worker. A deployment serves as soon as it
    has a decode worker, which computes prompts itself until then."""
    end, number = time.monotonic() + 90, 0
    while not transfers(roles)[0]:
        assert time.monotonic() < end, "no KV block moved"
        number += 1
        roles.chat(f"{number} " * 100, 2)  # a single token needs no hand-over


def ask_two(bench: Bench, two: Deployment, prompt: str) -> str:
    """Chat, send many streams, and kill a worker while both answer. Returns the first answer."""
    text, expected, tokens = two.chat(prompt, 32), "", bench.size(256, 200)
    with bench.step("live: chat by HTTP"):
        assert text, "an empty answer"
        check_text(two.chat(prompt, 32), text)
        expected = two.chat(prompt[1:], tokens)
    with bench.step("live: CPU of the loops at 32 streams"), ThreadPoolExecutor(32) as pool:
        loops = {e.name: e.pid for role in ("frontend", "worker") for e in two.processes(role)}
        before, began = {name: loop_s(pid) for name, pid in loops.items()}, time.perf_counter()
        list(pool.map(lambda n: two.chat(f"{n} {prompt}", tokens), range(bench.size(32, 4))))
        wall_s = time.perf_counter() - began
        for name, pid in loops.items():
            bench.figure(f"loop of {name}", (loop_s(pid) - before[name]) / wall_s, "cores", most=1)
    with bench.step("live: kill -9 mid-stream"), ThreadPoolExecutor(2) as pool:
        victims = [two.processes("worker")[0].pid]

        def kill() -> None:
            while victims:
                os.kill(victims.pop(), signal.SIGKILL)

        for answer in [
            pool.submit(two.chat, prompt[1:], tokens, on_text) for on_text in (kill, int)
        ]:
            check_text(answer.result(), expected)
        assert not victims, "no text came before the end"
    return text


def ask_ranks(bench: Bench, prompt: str, text: str) -> None:
    """Chat with a worker of two ranks, before and after one of them is killed."""
    if bench.device.type == "cuda" and bench.torch.cuda.device_count() < 2:
        raise Skipped("one card")
    with Deployment(bench, "ranks", "--tensor-parallel-size", "2") as ranks:
        check_text(ranks.chat(prompt, 32), text)
        (worker,) = ranks.processes("worker")
        children = Path(f"/proc/{worker.pid}/task").glob("*/children")
        (rank,) = [int(pid) for each in children for pid in each.read_text().split()]
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + 60
        while [each.pid for each in ranks.processes("worker")] in ([], [worker.pid]):
            assert time.monotonic() < end, "the worker is not replaced"
            time.sleep(0.3)
        with ranks:  # waits until it answers
            check_text(ranks.chat(prompt, 32), text)


def loop_s(pid: int) -> float:
    """Return the CPU time of the main thread of a process, where its event loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def check_text(text: str, expected: str) -> None:
    """Refuse a text that is not the expected one."""
    same = len(os.path.commonprefix((text, expected)))  # noqa: RUF071
    parts = f"{text[same:][:40]!r} is not {expected[same:][:40]!r}"
    assert text == expected, f"from character {same} of {len(expected)} on, {parts}"
