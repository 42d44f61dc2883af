"""The records that are live: those of processes whose pods are ready, or at least listed."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.communication.directory import RecordChange
from dynamo.communication.kubernetes.reflector import Metadata, ObjectChange

LISTED_PREFIXES: Final = ("/_supervisors/", "/_processes/")
"""Prefixes of records that live while the pod is listed, ready or not: a frontend waits for a
worker that is started again only if it sees the worker's supervisor."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """The process of an object, for others of its container. `start_ticks` tells it from a later
    process with the same `pid`."""

    container: str = ""
    pid: int = 0
    start_ticks: int = 0


class ProcessObject(msgspec.Struct, frozen=True):
    """A DynamoWorkerMetadata: the records of a process, and its pod."""

    name: str
    uid: str
    version: int
    pod_uid: str
    process: ProcessIdentity
    records: Mapping[str, bytes]


class _Data(msgspec.Struct, frozen=True):
    records: dict[str, str] = {}
    process: ProcessIdentity = ProcessIdentity()


class _Spec(msgspec.Struct, frozen=True):
    data: _Data = _Data()


class _Object(msgspec.Struct, frozen=True):
    spec: _Spec = _Spec()


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    uid: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    conditions: _Conditions | None = None
    target_ref: _Target | None = None


class _Slice(msgspec.Struct, frozen=True):
    endpoints: list[_Endpoint] | None = None


_object_decoder = msgspec.json.Decoder(_Object)
_slice_decoder = msgspec.json.Decoder(_Slice)
Readiness = Mapping[str, bool]
"""Whether the endpoint of a listed pod is ready, by the pod's uid."""


def decode_process_object(metadata: Metadata, data: bytes) -> ProcessObject:
    """Decode a DynamoWorkerMetadata. Raises `msgspec.DecodeError`."""
    content = _object_decoder.decode(data).spec.data
    try:
        records = {
            key: base64.b64decode(text, validate=True) for key, text in content.records.items()
        }
    except ValueError as error:
        raise msgspec.DecodeError(f"a record is not base64: {error}") from None
    pod = next((owner.uid for owner in metadata.owner_references if owner.kind == "Pod"), "")
    version = int(metadata.resource_version)
    return ProcessObject(metadata.name, metadata.uid, version, pod, content.process, records)


def decode_slice(metadata: Metadata, data: bytes) -> Readiness:
    """Decode an EndpointSlice. An endpoint of unknown readiness counts as ready."""
    del metadata
    return {
        endpoint.target_ref.uid: endpoint.conditions is None
        or endpoint.conditions.ready is not False
        for endpoint in _slice_decoder.decode(data).endpoints or ()
        if endpoint.target_ref is not None
    }


class LiveRecords:
    """Merges objects and slices to live `records`. The records of this process's own pod are always
    live to itself: it would else turn ready only after it has seen itself ready."""

    def __init__(self, own_pod_uid: str) -> None:
        self._own_pod_uid = own_pod_uid
        self._objects: dict[str, ProcessObject] = {}
        self._names_by_pod: dict[str, set[str]] = {}
        self._slices: dict[str, Readiness] = {}
        self._visible: dict[str, Mapping[str, bytes]] = {}
        self.records: dict[str, bytes] = {}

    def apply_objects(self, changes: Sequence[ObjectChange[ProcessObject]]) -> list[RecordChange]:
        """Apply changes of objects, and return those of records."""
        changed: list[RecordChange] = []
        for change in changes:
            if change.before is not None:
                self._names_by_pod.get(change.before.pod_uid, set()).discard(change.key)
            if change.value is None:
                self._objects.pop(change.key, None)
            else:
                self._objects[change.key] = change.value
                self._names_by_pod.setdefault(change.value.pod_uid, set()).add(change.key)
            self._update(change.key, changed)
        return changed

    def apply_slices(self, changes: Sequence[ObjectChange[Readiness]]) -> list[RecordChange]:
        """Apply changes of slices, and return those of records."""
        pods: set[str] = set()
        for change in changes:
            before, now = change.before or {}, change.value or {}
            pods |= {uid for uid in before.keys() | now.keys() if before.get(uid) != now.get(uid)}
            if change.value is None:
                self._slices.pop(change.key, None)
            else:
                self._slices[change.key] = change.value
        changed: list[RecordChange] = []
        for uid in pods:
            for name in self._names_by_pod.get(uid, ()):
                self._update(name, changed)
        return changed

    def _update(self, name: str, changed: list[RecordChange]) -> None:
        """Compute the live records of an object again."""
        before, now = self._visible.pop(name, {}), self._live_of(self._objects.get(name))
        if now:
            self._visible[name] = now
        for key, value in now.items():
            if before.get(key) != value:
                self.records[key] = value
                changed.append(RecordChange(key, value))
        for key in before.keys() - now.keys():
            others = (other[key] for other in self._visible.values() if key in other)
            other_value = next(others, None)
            if other_value is None:
                del self.records[key]
            else:
                self.records[key] = other_value
            changed.append(RecordChange(key, other_value))

    def _live_of(self, process: ProcessObject | None) -> Mapping[str, bytes]:
        if process is None:
            return {}
        uid = process.pod_uid
        states = [readiness[uid] for readiness in self._slices.values() if uid in readiness]
        if any(states) or (uid and uid == self._own_pod_uid):
            return process.records
        if not states:
            return {}
        return {
            key: value for key, value in process.records.items() if key.startswith(LISTED_PREFIXES)
        }
