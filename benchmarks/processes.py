"""Processes of a deployment, a thread that kills them, and the planes that they use."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from servers import Server
from streams import now

from dynamo.runtime.deployment import Deployment, ProcessRecord, live_deployments

PLANES = ("tcp", "etcd-nats")


class Kill(NamedTuple):
    """A killed process, the time, and the number of ready processes of its role."""

    at: float
    instance: str
    ready: int


class Killer(threading.Thread):
    """Kills a process of the next of `roles` every `every_s` seconds while at least `spare` others
    of that role are ready. A thread, since listing processes would block the event loop of the
    clients."""

    def __init__(
        self, deployment: Deployment, roles: Sequence[str], every_s: float, spare: int
    ) -> None:
        super().__init__(name=" and ".join(roles), daemon=True)
        self._deployment, self._roles = deployment, itertools.cycle(roles)
        self._every_s, self._spare = every_s, spare
        self._rng, self._ended = random.Random(0), threading.Event()
        self.kills: list[Kill] = []

    def run(self) -> None:
        due = now() + self._every_s
        while not self._ended.wait(max(0.0, due - now())):
            due += self._every_s
            candidates = ready(self._deployment, next(self._roles))
            if len(candidates) > self._spare:
                victim = self._rng.choice(candidates)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                    self.kills.append(Kill(now(), victim.instance, len(candidates)))

    def stop(self) -> None:
        """Stop killing."""
        self._ended.set()
        self.join()


def deployment_of(server: Server) -> Deployment:
    """Return the deployment behind a server's URL."""
    name = f"http-{server.url.rsplit(':', 1)[1]}"
    return next(item for item in live_deployments() if item.id == name)


def ready(deployment: Deployment, role: str) -> list[ProcessRecord]:
    """Return the ready processes of a role."""
    return [
        process
        for process in deployment.live_processes()
        if process.role == role and process.state == "ready"
    ]


def wait_ready(deployment: Deployment, role: str, count: int) -> None:
    """Wait at most 60 s until `count` processes of a role are ready."""
    end = now() + 60
    while len(ready(deployment, role)) < count:
        if now() > end:
            sys.exit(f"not {count} of role {role} in 60 s")
        time.sleep(0.1)


def metric(server: Server, name: str) -> float:
    """Return the sum of a frontend's metric over its labels."""
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    named = (line for line in lines if line.startswith((name + " ", name + "{")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in named)


@contextlib.contextmanager
def planes(kind: str) -> Iterator[Sequence[str]]:
    """Yield the flags of `dynamo run` for these planes, with real etcd and NATS servers."""
    if kind == "tcp":
        yield ()
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.servers import EtcdProcess, NatsProcess

    with EtcdProcess() as etcd, NatsProcess() as nats:
        yield ("--discovery", etcd.url, "--request-plane", nats.url, "--event-plane", nats.url)
