"""The garbage collector: objects go with their owners, and namespaces with their content."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.objects import ClusterObjects
from dynamo.testing.kubernetes.store import Change, Key

Place = tuple[str, Key]


class GarbageCollector(Controller):
    """Deletes objects whose owners are gone. Keys are places: kind and key of an object."""

    def __init__(self, objects: ClusterObjects) -> None:
        self._dependents: dict[str, set[Place]] = defaultdict(set)
        self._places: dict[str, Place] = {}
        super().__init__(objects)

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        metadata = change.after["metadata"]
        place: Place = change.kind, (metadata.get("namespace", ""), metadata["name"])
        owners = [owner["uid"] for owner in metadata.get("ownerReferences") or ()]
        for uid in owners:
            (set.discard if change.deleted else set.add)(self._dependents[uid], place)
        if not change.deleted:
            self._places[metadata["uid"]] = place
            return (place,)
        self._places.pop(metadata["uid"], None)
        own = self._dependents.pop(metadata["uid"], set())
        held = [self._places[uid] for uid in owners if uid in self._places]
        return (*own, *held)

    def reconcile(self, key: Any) -> None:
        kind, name = key
        item = self.store.get(kind, name)
        if item is None:
            return
        metadata = item["metadata"]
        owners = [owner["uid"] for owner in metadata.get("ownerReferences") or ()]
        if owners and not any(uid in self._places for uid in owners):
            if "deletionTimestamp" not in metadata:
                self.objects.delete(self.target(kind, item), {"propagationPolicy": "Background"})
            return
        if "deletionTimestamp" not in metadata:
            return
        finalizers = metadata.get("finalizers") or ()
        if "foregroundDeletion" in finalizers and self._all_gone(metadata["uid"]):
            self._release(kind, item, "foregroundDeletion")
        elif "orphan" in finalizers:
            self._orphan(metadata["uid"])
            self._release(kind, item, "orphan")

    def _all_gone(self, uid: str) -> bool:
        """Delete the dependents of an object, and return whether none is left."""
        left = False
        for kind, key in tuple(self._dependents[uid]):
            item = self.store.get(kind, key)
            if item is not None:
                left = True
                if "deletionTimestamp" not in item["metadata"]:
                    policy = {"propagationPolicy": "Foreground"}
                    self.objects.delete(self.target(kind, item), policy)
        return not left

    def _orphan(self, uid: str) -> None:
        for kind, key in tuple(self._dependents.pop(uid, ())):
            item = self.store.get(kind, key)
            if item is not None:
                owners = [o for o in item["metadata"]["ownerReferences"] if o["uid"] != uid]
                metadata = item["metadata"] | {"ownerReferences": owners}
                self.objects.replace(self.target(kind, item), item | {"metadata": metadata})

    def _release(self, kind: str, item: Object, finalizer: str) -> None:
        finalizers = [f for f in item["metadata"]["finalizers"] if f != finalizer]
        metadata = item["metadata"] | {"finalizers": finalizers}
        self.objects.replace(self.target(kind, item), item | {"metadata": metadata})


class Namespaces(Controller):
    """Gives each namespace its service account, and empties one that is deleted."""

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        metadata = change.after["metadata"]
        if change.kind == "namespaces":
            return (metadata["name"],)
        return (metadata["namespace"],) if change.deleted and "namespace" in metadata else ()

    def reconcile(self, key: Any) -> None:
        namespace = self.store.get("namespaces", ("", key))
        if namespace is None:
            return
        if "deletionTimestamp" not in namespace["metadata"]:
            if "kubernetes" not in (namespace["metadata"].get("finalizers") or ()):
                metadata = namespace["metadata"] | {"finalizers": ["kubernetes"]}
                target = self.target("namespaces", namespace)
                self.objects.replace(target, namespace | {"metadata": metadata})
            if self.store.get("serviceaccounts", (key, "default")) is None:
                target = self.objects.target("serviceaccounts", key, "")
                self.objects.create(target, {"metadata": {"name": "default"}})
            return
        left = False
        for kind in self.objects.kinds.values():
            for item in self.store.items(kind.id, key) if kind.namespaced else ():
                left = True
                if "deletionTimestamp" not in item["metadata"]:
                    self.objects.delete(self.target(kind.id, item), {})
        if not left:
            metadata = namespace["metadata"] | {"finalizers": []}
            self.objects.replace(
                self.target("namespaces", namespace), namespace | {"metadata": metadata}
            )
