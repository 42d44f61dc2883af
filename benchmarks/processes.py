"""The processes of a deployment, who kills them, and the planes that they talk over."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from servers import Server
from streams import now

from dynamo.runtime.deployment import Deployment, ProcessRecord, live_deployments

PLANES = ("tcp", "etcd-nats")


class Kill(NamedTuple):
    """A process that was killed, when, and how many of its role served."""

    at: float
    instance: str
    ready: int


class Killer(threading.Thread):
    """Kills a process of `role` every `every_s`, while at least `spare` others serve. A thread: to
    look for processes in the clients' loop would be a pause of every stream."""

    def __init__(self, deployment: Deployment, role: str, every_s: float, spare: int) -> None:
        super().__init__(name=role, daemon=True)
        self._deployment, self._role = deployment, role
        self._every_s, self._spare = every_s, spare
        self._rng, self._ended = random.Random(0), threading.Event()
        self.kills: list[Kill] = []

    def run(self) -> None:
        due = now() + self._every_s
        while not self._ended.wait(max(0.0, due - now())):
            due += self._every_s
            found = ready(self._deployment, self._role)
            if len(found) > self._spare:
                victim = self._rng.choice(found)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                    self.kills.append(Kill(now(), victim.instance, len(found)))

    def stop(self) -> None:
        """Kill no more."""
        self._ended.set()
        self.join()


def deployment_of(server: Server) -> Deployment:
    """The deployment behind a server's URL."""
    name = f"http-{server.url.rsplit(':', 1)[1]}"
    return next(one for one in live_deployments() if one.id == name)


def ready(deployment: Deployment, role: str) -> list[ProcessRecord]:
    """Its processes of that role that serve."""
    return [one for one in deployment.live_processes() if one.role == role and one.state == "ready"]


def wait_ready(deployment: Deployment, role: str, count: int) -> None:
    """Until so many serve, 60 s at most."""
    end = now() + 60
    while len(ready(deployment, role)) < count:
        if now() > end:
            sys.exit(f"not {count} of role {role} in 60 s")
        time.sleep(0.1)


def metric(server: Server, name: str) -> float:
    """The sum of a metric of the frontend over its labels."""
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    named = (line for line in lines if line.startswith((name + " ", name + "{")))
    return sum(float(line.rsplit(" ", 1)[1]) for line in named)


@contextlib.contextmanager
def planes(kind: str) -> Iterator[Sequence[str]]:
    """The flags of `dynamo run` for these planes; real etcd and NATS servers meanwhile."""
    if kind == "tcp":
        yield ()
        return
    from dynamo.testing.servers import EtcdProcess, NatsProcess

    with EtcdProcess() as etcd, NatsProcess() as nats:
        yield ("--discovery", etcd.url, "--request-plane", nats.url, "--event-plane", nats.url)
