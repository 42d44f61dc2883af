"""Runtimes that stand for several processes, on their own memory planes."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.reply import SendRequest
from dynamo.core.settings import Settings
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.runtime import Client, DistributedRuntime
from dynamo.scheduling.dispatch import Dispatch
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.pipeline import chain
from dynamo.scheduling.router import BasicPolicy, Observer, Policy, WorkerRouter
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.telemetry import Registry

Open = Callable[[], Awaitable[DistributedRuntime]]
_networks = itertools.count()


def send_through(
    client: Client,
    policy: Policy | str,
    metrics: Registry | None = None,
    *,
    clock: Clock | None = None,
    ledger: Ledger | None = None,
    observers: Sequence[Observer] = (),
) -> SendRequest:
    """A pipeline of migration, router and dispatch to the instances of `client`. `policy` may be
    the name of a basic mode."""
    clock = clock or SystemClock()
    router = WorkerRouter(
        BasicPolicy(client, policy) if isinstance(policy, str) else policy,
        Dispatch(client).send,
        metrics,
        clock=clock,
        observers=observers,
        ledger=ledger or Ledger(clock, client),
    )
    return chain([Migration(clock, client.rng, metrics or Registry())], router.send)


class Processes:
    """`open` creates one more runtime, `close` shuts all down. `settings` applies to all of them,
    apart from the planes."""

    def __init__(self, clock: Clock | None = None, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        url = f"memory:processes-{next(_networks)}"
        planes = replace(settings.runtime, discovery=url, requests="memory:", events="memory:")
        settings = replace(settings, runtime=planes)
        self._create = partial(DistributedRuntime.create, settings, clock=clock)
        self._opened: list[DistributedRuntime] = []

    async def open(self) -> DistributedRuntime:
        self._opened.append(await self._create())
        return self._opened[-1]

    async def close(self) -> None:
        for runtime in reversed(self._opened):
            await runtime.shutdown(0)


class Closable(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


def play_virtually(
    create: Callable[[VirtualClock], C], play: Callable[[C], Awaitable[Any]]
) -> None:
    """Run `play(create(clock))` on virtual time, then close the created object."""

    async def main(clock: VirtualClock) -> None:
        cluster = create(clock)
        try:
            await play(cluster)
        finally:
            await cluster.close()

    run_in_virtual_time(main)
