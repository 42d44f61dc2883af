"""The loop of a controller: keys that are dirty are reconciled, and again after a failure."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable

from dynamo.testing.kubernetes.failures import ApiFailure
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.objects import ClusterObjects, Target
from dynamo.testing.kubernetes.store import Change

log = logging.getLogger(__name__)
RETRY_S = 0.05


class Controller(ABC):
    """Reconciles what changes of objects make dirty."""

    kinds: tuple[str, ...] = ("",)
    """The ids of the kinds whose changes matter; "" stands for all."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.objects = objects
        self.store = objects.store
        self._dirty: dict[Hashable, None] = {}
        self._ready = asyncio.Event()
        for kind in self.kinds:
            self.store.watchers.setdefault(kind, set()).add(self.on_change)
            for plural in self.objects.kinds if kind == "" else (kind,):
                for item in self.store.items(plural):
                    self.on_change(Change(0, plural, None, item, deleted=False))

    def mark(self, keys: Iterable[Hashable]) -> None:
        """Reconcile keys in the next turn of the loop."""
        for key in keys:
            self._dirty[key] = None
        if self._dirty:
            self._ready.set()

    def on_change(self, change: Change) -> None:
        """Mark what a change makes dirty."""
        self.mark(self.keys_of(change))

    @abstractmethod
    def keys_of(self, change: Change) -> Iterable[Hashable]:
        """Return the keys that a change makes dirty."""

    @abstractmethod
    def reconcile(self, key: Hashable) -> None:
        """Bring the objects of a key to what they should be."""

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            dirty, self._dirty = self._dirty, {}
            for key in dirty:
                try:
                    self.reconcile(key)
                except ApiFailure as failure:
                    if failure.code != 404:
                        log.debug("%s: %s", type(self).__name__, failure)
                        self._dirty[key] = None
            if self._dirty:
                await asyncio.sleep(RETRY_S)
                self._ready.set()

    def target(self, kind: str, item: Object, subresource: str = "") -> Target:
        """Return the target for an object."""
        metadata = item["metadata"]
        return self.objects.target(
            kind, metadata.get("namespace", ""), metadata["name"], subresource
        )

    def put_status(self, kind: str, item: Object, status: Object) -> None:
        """Write the status of an object if it differs."""
        if item.get("status") != status:
            self.objects.replace(self.target(kind, item, "status"), item | {"status": status})
