"""Lists and watches: pages, selectors, initial events, bookmarks, histories."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.communication.http import Response
from dynamo.core.tasks import wait_at_most
from dynamo.testing.kubernetes.failures import ApiFailure, expired
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.objects import ClusterObjects, Target
from dynamo.testing.kubernetes.selectors import Selector, field_selector, label_selector
from dynamo.testing.kubernetes.store import Change

JSON = (("content-type", "application/json"),)
KEPT_PAGES = 64


def selector_of(query: Mapping[str, str]) -> Selector:
    """Return the selector of a query. Raises `ApiFailure`."""
    tests = []
    if query.get("labelSelector"):
        tests.append(label_selector(query["labelSelector"]))
    if query.get("fieldSelector"):
        tests.append(field_selector(query["fieldSelector"]))
    return lambda item: all(test(item) for test in tests)


class Pages:
    """The rests of lists that clients read in pages, each of one moment."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, list[Object]]] = {}

    def clear(self) -> None:
        """Forget all rests, as after a compaction."""
        self._rests.clear()

    def cut(
        self, items: list[Object], version: int, query: Mapping[str, str]
    ) -> tuple[list[Object], Object]:
        """Return the items of a page and the metadata of its list. Raises `ApiFailure` 410."""
        token = query.get("continue", "")
        if token:
            if token not in self._rests:
                raise expired("The provided continue parameter is too old to display a consistent "
                              "list result.")  # fmt: skip
            version, items = self._rests.pop(token)
        limit = int(query.get("limit") or 0) or len(items)
        metadata: Object = {"resourceVersion": str(version)}
        if len(items) > limit:
            text = f"{version}/{len(self._rests)}/{items[limit]['metadata']['uid']}"
            token = base64.urlsafe_b64encode(text.encode()).decode()
            self._rests[token] = version, items[limit:]
            metadata |= {"continue": token, "remainingItemCount": len(items) - limit}
            while len(self._rests) > KEPT_PAGES:
                del self._rests[next(iter(self._rests))]
        return items[:limit], metadata


class Watch:
    """A watch stream. Events are written when the object changes, without a queue."""

    def __init__(
        self,
        objects: ClusterObjects,
        target: Target,
        query: Mapping[str, str],
        response: Response,
        show: Callable[[Object], Any],
    ) -> None:
        """`show` gives an object its form in the stream: itself, or a table."""
        self._objects = objects
        self._target = target
        self._query = query
        self._response = response
        self._show = show
        self._selects = selector_of(query)
        self._sent = 0
        self.cut = asyncio.Event()

    async def run(self, bookmark_s: float) -> None:
        """Stream until the time is over, or `cut` is set. Raises `ApiFailure` before its start."""
        query, store, kind = self._query, self._objects.store, self._target.kind.id
        seconds = float(query.get("timeoutSeconds") or 3600)
        wants_bookmarks = query.get("allowWatchBookmarks") == "true"
        start = query.get("resourceVersion", "")
        try:
            if start in ("", "0") or query.get("sendInitialEvents") == "true":
                self._start_with_state(wants_bookmarks)
            else:
                changes = list(store.changes_since(kind, int(start)))
                self._response.start(200, JSON)
                self._sent = int(start)
                for change in changes:
                    self.on_change(change)
        except ApiFailure as failure:
            self._response.start(200, JSON)
            self._send("ERROR", failure.status)
            self._response.end()
            return
        callbacks = store.watchers.setdefault(kind, set())
        callbacks.add(self.on_change)
        try:
            while seconds > 0 and self._response.open and not self.cut.is_set():
                step = min(seconds, bookmark_s)
                await wait_at_most(self.cut.wait(), step)
                seconds -= step
                if wants_bookmarks and not self.cut.is_set():
                    self._bookmark({})
        finally:
            callbacks.discard(self.on_change)
        if self._response.open:
            self._response.end()

    def _start_with_state(self, wants_bookmarks: bool) -> None:
        self._response.start(200, JSON)
        store = self._objects.store
        self._sent = store.version
        for item in store.items(self._target.kind.id, self._target.key[0]):
            if self._selects(item):
                self._send("ADDED", self._show(self._objects.in_version(self._target, item)))
        if wants_bookmarks and self._query.get("sendInitialEvents") == "true":
            self._bookmark({"annotations": {"k8s.io/initial-events-end": "true"}})

    def on_change(self, change: Change) -> None:
        """Send a change that concerns this watch."""
        namespace = self._target.key[0]
        if change.version <= self._sent:
            return
        self._sent = change.version
        if namespace and change.after["metadata"].get("namespace") != namespace:
            return
        was = change.before is not None and self._selects(change.before)
        shown = not change.deleted and self._selects(change.after)
        if not was and not shown:
            return
        name = "ADDED" if not was else "MODIFIED" if shown else "DELETED"
        self._send(name, self._show(self._objects.in_version(self._target, change.after)))

    def _bookmark(self, metadata: Object) -> None:
        version = str(self._objects.store.version)
        kind = self._target.kind
        item = {
            "kind": kind.name, "apiVersion": kind.api_version(self._target.version),
            "metadata": {"resourceVersion": version, "creationTimestamp": None} | metadata,
        }  # fmt: skip
        self._send("BOOKMARK", item)

    def _send(self, name: str, item: Any) -> None:
        self._response.write(msgspec.json.encode({"type": name, "object": item}) + b"\n")
