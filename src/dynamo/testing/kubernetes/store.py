"""The store of a cluster: objects under one resource version, with a history of their changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dynamo.testing.kubernetes.failures import expired
from dynamo.testing.kubernetes.kinds import Object

FIRST_VERSION = 1000
KEPT_CHANGES = 20_000
Key = tuple[str, str]
"""Namespace ("" for kinds of the cluster) and name."""


class Change(NamedTuple):
    """A change of an object. `before` is None for a new one. `after` is the last state if it was
    deleted."""

    version: int
    kind: str
    before: Object | None
    after: Object
    deleted: bool


OnChange = Callable[[Change], None]


class ClusterStore:
    """Objects by kind and key. Objects are replaced as a whole and never changed in place."""

    def __init__(self, kept_changes: int = KEPT_CHANGES) -> None:
        self.version = self.oldest = FIRST_VERSION
        self._objects: dict[str, dict[Key, Object]] = {}
        self._changes: deque[Change] = deque()
        self._kept_changes = kept_changes
        self.watchers: dict[str, set[OnChange]] = {}
        """Callbacks by kind. The callbacks of "" get all changes, before the others."""

    def get(self, kind: str, key: Key) -> Object | None:
        """Return an object."""
        return self._objects.get(kind, {}).get(key)

    def items(self, kind: str, namespace: str = "") -> list[Object]:
        """Return the objects of a kind in the order of their keys."""
        objects = self._objects.get(kind, {})
        return [objects[key] for key in sorted(objects) if not namespace or key[0] == namespace]

    def put(self, kind: str, key: Key, value: Object) -> Object:
        """Write an object and return it with its new resource version."""
        objects = self._objects.setdefault(kind, {})
        before = objects.get(key)
        self.version += 1
        after = {**value, "metadata": value["metadata"] | {"resourceVersion": str(self.version)}}
        objects[key] = after
        self._publish(Change(self.version, kind, before, after, deleted=False))
        return after

    def remove(self, kind: str, key: Key) -> Object:
        """Delete an object and return its last state."""
        before = self._objects[kind].pop(key)
        self.version += 1
        after = {**before, "metadata": before["metadata"] | {"resourceVersion": str(self.version)}}
        self._publish(Change(self.version, kind, before, after, deleted=True))
        return after

    def changes_since(self, kind: str, version: int) -> Iterator[Change]:
        """Return the changes after a version. Raises `ApiFailure` 410 for what is forgotten."""
        if version < self.oldest:
            raise expired(f"too old resource version: {version} ({self.oldest})")
        return (c for c in self._changes if c.version > version and c.kind == kind)

    def compact(self) -> None:
        """Forget the history, so that watches of older versions get a 410."""
        self._changes.clear()
        self.oldest = self.version

    def backup(self) -> Any:
        """Return the present state for `restore`."""
        return self.version, {kind: dict(objects) for kind, objects in self._objects.items()}

    def restore(self, backup: Any) -> None:
        """Return to an older state, with its older version, as after the loss of a database."""
        self.version, objects = backup
        self._objects = {kind: dict(of_kind) for kind, of_kind in objects.items()}
        self.compact()

    def _publish(self, change: Change) -> None:
        self._changes.append(change)
        if len(self._changes) > self._kept_changes:
            self.oldest = self._changes.popleft().version
        for name in ("", change.kind):
            for callback in tuple(self.watchers.get(name, ())):
                callback(change)
