"""Wakes a sleeping worker of a model when requests find none that is awake."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.calls.client import Client
from dynamo.runtime.sleep import SleepOrder, encode_sleep_order, sleep_level

log = logging.getLogger(__name__)


class SleepingWorkers:
    """The sleeping workers of one model: `sleepers` are their instances of the endpoint `sleep`,
    and `client` knows the workers that serve. A frontend wakes a single worker at a time, of the
    lowest level; all frontends choose the same."""

    def __init__(self, client: Client, sleepers: Client) -> None:
        self._client = client
        self._sleepers = sleepers
        self._tasks = BackgroundTasks()
        self._failed: set[str] = set()
        self._is_wanted = False
        self._unsubscribe = sleepers.on_change(self._on_change)

    def __bool__(self) -> bool:
        """Whether a worker sleeps, or falls asleep."""
        return bool(self._sleepers.instances)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a worker falls asleep or is awake again."""
        self._sleepers.on_change(listener)

    def wake_one(self) -> None:
        """Let a worker wake up, now or as soon as one sleeps, unless another one serves by then."""
        self._is_wanted = True
        self._on_change()

    async def close(self) -> None:
        """Stop following the workers. A worker that wakes up goes on."""
        self._unsubscribe()
        await self._tasks.close()

    def _on_change(self) -> None:
        sleepers = self._sleepers.instances
        self._failed &= sleepers.keys()
        if not self._is_wanted or len(self._tasks):
            return
        if self._client.instances:
            self._is_wanted = False
        elif choice := sorted(sleepers.keys() - self._failed):
            chosen = min(choice, key=lambda name: (sleep_level(sleepers[name]), name))
            self._tasks.start(self._wake(chosen), "wake a worker")

    async def _wake(self, name: str) -> None:
        log.info("a request wakes a worker", extra={"fields": {"instance": name}})
        instance = self._sleepers.instances[name]
        payload = encode_sleep_order(SleepOrder(0))
        try:
            await self._sleepers.collect(instance, payload, Context("wake"))
            self._is_wanted = False
        except DynamoError as error:
            fields = {"instance": name, "error": error.message}
            log.warning("a worker does not wake up", extra={"fields": fields})
            self._failed.add(name)
