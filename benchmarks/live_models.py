"""The part `live` of `several_models.py`: models come, go and change under load."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from load import rss_mb, vocabulary
from own_index import TOKENS
from processes import deployment_of
from servers import Server
from streams import LoopLag, StreamClient, now

from dynamo.runtime.deployment import Deployment

PROMPT, PROMPTS = 30, 200
"""Words of a prompt, and how many prompts there are. A repeated one must get the same answer."""
GRACE_S = 1.0
"""A removed name may be answered for this long."""
ASKED_AFTER_REMOVAL_S = 2.5
CHANGING = re.compile("bytes|seconds|ratio|_info|latency|tokens|blocks|clients|_ms|lag|rate")
"""Gauges that differ between two moments without a leak."""


class Answer(NamedTuple):
    """The part of a stream that is kept. `error` is empty if it is complete; `text` is its hash."""

    name: str
    key: int
    started: float
    ended: float
    status: int
    error: str
    text: int


class OpenLoad:
    """Sends requests to `names` in turn at a rate, however long the answers take."""

    def __init__(self, client: StreamClient, names: Sequence[str], rate: float) -> None:
        self._client, self._names, self._rate = client, names, rate
        self.answers: list[Answer] = []
        self.seconds = 0.0

    async def run(self, ended: asyncio.Event) -> None:
        """Send requests until the event, then wait for all answers."""
        started = now()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                await asyncio.sleep(max(0.0, started + number / self._rate - now()))
                if ended.is_set():
                    self.seconds += now() - started
                    return
                group.create_task(self._send(self._names[number % len(self._names)], number))

    async def _send(self, name: str, number: int) -> None:
        key = number % PROMPTS
        request = self._client.encode_request(key, PROMPT, TOKENS, name)
        stream = await self._client.send(key, request)
        error = "" if stream.is_complete(TOKENS) else stream.error[:120] or "cut"
        self.answers.append(
            Answer(name, key, stream.started, stream.ended, stream.status, error, hash(stream.text))
        )


async def dynamo(server: Server, *words: str) -> str:
    """Run a command on the deployment, and return its output."""
    command = [sys.executable, "-m", "dynamo", *words, "--deployment", server.url.rsplit(":", 1)[1]]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {output.decode()}")
    return output.decode()


class Changes:
    """Changes the models of a deployment. `removed` has the times at which the removal of a name
    began and ended."""

    def __init__(self, args: argparse.Namespace, server: Server) -> None:
        self._args, self._server, self._rng = args, server, random.Random(args.seed)
        self._numbers = itertools.count()
        self._alias_of = "a"
        self.added: list[str] = []
        self.removed: dict[str, tuple[float, float]] = {}
        self.names = ["a", "b", "chat"]
        self.done = Counter[str]()

    async def run(self) -> None:
        """Make all changes, then undo them."""
        for _ in range(self._args.changes):
            await self._rng.choice([self._add, self._remove, self._move, self._scale])()
        while self.added:
            await self._remove()
        await self._point_alias("a")
        for model in "ab":
            await dynamo(self._server, "scale", f"{model}-worker=2")
        await asyncio.sleep(ASKED_AFTER_REMOVAL_S)

    async def _add(self) -> None:
        name = f"m{next(self._numbers)}"
        await dynamo(self._server, "add", self._args.model, "out=mock", "--model-name", name)
        self.added.append(name)
        self.names.append(name)
        self.done["added"] += 1

    async def _remove(self) -> None:
        if not self.added:
            return
        name = self.added.pop(self._rng.randrange(len(self.added)))
        if name == self._alias_of:
            await self._point_alias("a")
        began = now()
        self.removed[name] = began, inf
        await dynamo(self._server, "remove", name)
        self.removed[name] = began, now()
        asyncio.get_running_loop().call_later(ASKED_AFTER_REMOVAL_S, self.names.remove, name)
        self.done["removed"] += 1

    async def _move(self) -> None:
        await self._point_alias(self._rng.choice(["a", "b", *self.added]))
        self.done["moved"] += 1

    async def _point_alias(self, model: str) -> None:
        self._alias_of = model
        await dynamo(self._server, "models", "--alias", f"chat={model}")

    async def _scale(self) -> None:
        count = self._rng.choice([1, 2, 3])
        await dynamo(self._server, "scale", f"{self._rng.choice('ab')}-worker={count}")
        self.done["scaled"] += 1


def page(url: str) -> str:
    """Return the metrics of a URL."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def count_entries(folder: str) -> int:
    """Return the number of entries of a folder."""
    return sum(1 for _ in Path(folder).iterdir())


def state(deployment: Deployment) -> Mapping[str, Any]:
    """Return the processes, files, descriptors and gauges of a deployment, by kind."""
    processes = deployment.live_processes()
    supervised = [p for p in processes if p.role in {"frontend", "supervisor", "observer"}]
    gauges = dict[str, str]()
    for process in processes:
        if process.role != "frontend":
            continue
        text = page(process.status_url)
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            if kinds.get(name) == "gauge" and not CHANGING.search(name):
                gauges[f"{process.name} {re.sub(r'-[0-9a-f]{10}', '', series)}"] = value
            elif re.search(r'model="m\d', line):
                gauges[f"{process.name} {series}"] = "left"
    files = [
        re.sub(r"-\d+-[0-9a-f]{10}|[0-9a-f]{16,}", "*", str(p))
        for p in deployment.folder.rglob("*")
    ]
    return {
        "processes": sorted(process.name.rstrip("0123456789") for process in processes),
        "files": sorted(name for name in files if "/record/" not in name),
        "descriptors": {p.name: count_entries(f"/proc/{p.pid}/fd") for p in supervised},
        "threads": {p.name: count_entries(f"/proc/{p.pid}/task") for p in supervised},
        "gauges": gauges,
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two states differ in."""
    different = dict[str, Any]()
    for kind, old in before.items():
        new = after[kind]
        if isinstance(old, dict):
            keys = sorted(old.keys() | new.keys())
            changed: Any = {k: [old.get(k), new.get(k)] for k in keys if old.get(k) != new.get(k)}
        else:
            lost, added = Counter(old) - Counter(new), Counter(new) - Counter(old)
            changed = {"lost": sorted(lost), "added": sorted(added)} if lost or added else {}
        if changed:
            different[kind] = changed
    return different


def memory_of(pid: int) -> float:
    """Return the private memory of a process in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE)) / 1e3


def judge(load: OpenLoad, changes: Changes) -> dict[str, Any]:
    """Return how the requests fared."""
    failed, late, texts = Counter[str](), 0, dict[int, Counter[int]]()
    for answer in load.answers:
        began, removed = changes.removed.get(answer.name, (inf, inf))
        if not answer.error:
            late += answer.started > removed + GRACE_S
            texts.setdefault(answer.key, Counter())[answer.text] += 1
        elif not (answer.status == 404 and answer.ended >= began):
            took = round(answer.ended - answer.started)
            failed[f"{re.sub('[0-9]', '', answer.name)} after {took} s: {answer.error}"] += 1
    return {
        "requests": len(load.answers),
        "refused_404": sum(answer.status == 404 for answer in load.answers),
        "answered_late": late,
        "altered": sum(each.total() - max(each.values()) for each in texts.values()),
        "failed": failed,
    }


async def live(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Return how requests fared while models changed, and what was left after each campaign."""
    changes = Changes(args, server)
    load = OpenLoad(StreamClient(server.url, vocabulary(args.model)), changes.names, args.rate)
    await dynamo(server, "models", "--alias", "chat=a")
    deployment = deployment_of(server)
    frontends = [p.pid for p in deployment.live_processes() if p.role == "frontend"]
    rss, private, different, ended = list[list[float]](), [], [], asyncio.Event()
    async with LoopLag() as lag:
        sending = asyncio.create_task(load.run(ended))
        await asyncio.sleep(args.seconds)
        for campaign in range(args.campaigns + 1):
            if campaign:
                await changes.run()
            ended.set()
            await sending
            await asyncio.sleep(5)
            rss.append([rss_mb(pid) for pid in frontends])
            private.append([memory_of(pid) for pid in frontends])
            different.append(await asyncio.to_thread(state, deployment))
            ended.clear()
            if campaign < args.campaigns:
                sending = asyncio.create_task(load.run(ended))

    def growth(memory: list[list[float]]) -> list[list[float]]:
        pairs = itertools.pairwise(memory)
        return [[round(b - a, 1) for a, b in zip(*pair, strict=True)] for pair in pairs]

    report = judge(load, changes)
    return {
        **report,
        "rate": round(report["requests"] / load.seconds, 1),
        "client_lag_ms": lag.percentiles(),
        "changes": changes.done,
        "differences": [differences(different[0], each) for each in different[1:]],
        "frontend_mb": rss[0],
        "frontend_mb_grown": growth(rss),
        "frontend_private_mb_grown": growth(private),
        "holds": not (report["failed"] or report["answered_late"] or report["altered"]),
    }
