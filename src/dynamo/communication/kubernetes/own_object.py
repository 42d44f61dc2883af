"""The DynamoWorkerMetadata of this process: written in one patch for what comes together."""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Any, Final
from uuid import uuid4

import msgspec

from dynamo.communication.kubernetes.link import (
    CONFLICT,
    MERGE_PATCH,
    NOT_FOUND,
    AllowedStatuses,
    KubernetesLink,
)
from dynamo.communication.kubernetes.live_records import ProcessIdentity, ProcessObject
from dynamo.core.clock import Backoff
from dynamo.core.errors import PlaneUnavailable, TooLarge, Unsupported
from dynamo.core.host.pids import start_ticks

GATHER_S: Final = 0.02
"""Writes that come within this time share one request."""
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 1.0
MAX_BYTES: Final = 1 << 20
"""Limit of the keys and encoded values of a process."""
MAX_POD_NAME: Final = 230


class PodIdentity(msgspec.Struct, frozen=True):
    """The pod and container of this process, by the environment. Empty outside of a cluster.
    `graph` is the DynamoGraphDeployment that the pod belongs to, or ""."""

    name: str
    uid: str
    namespace: str
    container: str
    graph: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> PodIdentity:
        """Return the identity of this process's pod."""
        namespace = environ.get("DYN_PARENT_DGD_K8S_NAMESPACE") or environ.get("POD_NAMESPACE", "")
        return cls(
            name=environ.get("POD_NAME", ""),
            uid=environ.get("POD_UID", ""),
            namespace=namespace,
            container=environ.get("CONTAINER_NAME") or "main",
            graph=environ.get("DYN_PARENT_DGD_K8S_NAME", ""),
        )


class OwnObject:
    """Writes the records of this process to its object, which the pod owns.

    `on_lost` is called when the object was deleted by others; it is then created again.
    """

    def __init__(
        self,
        link: KubernetesLink,
        path: str,
        pod: PodIdentity,
        labels: Mapping[str, str],
        on_lost: Callable[[], None],
    ) -> None:
        self.name = f"{pod.name[:MAX_POD_NAME]}-{uuid4().hex[:8]}"
        self._link = link
        self._path = path
        self._pod = pod
        self._labels = labels
        self._on_lost = on_lost
        self._desired: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._uid = ""
        self._version = 0
        self._away = False
        self._dirty = asyncio.Event()
        self._attempt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._identity = ProcessIdentity(pod.container, os.getpid(), start_ticks(os.getpid()))

    def is_leftover(self, process: ProcessObject) -> bool:
        """Return whether an object is of a process of this container that has ended."""
        other = process.process
        return (
            process.pod_uid == self._pod.uid
            and process.name != self.name
            and other.container == self._pod.container
            and bool(other.pid)
            and start_ticks(other.pid) != other.start_ticks
        )

    async def write(self, key: str, value: bytes | None) -> None:
        """Write a record, or delete it (None), and return after the next attempt, or at once while
        the server is away. A write that failed is repeated until it is back. Raises `TooLarge`,
        `Unsupported`."""
        if value is None:
            self._desired.pop(key, None)
            if key not in self._written:
                return
        else:
            self._check(key, value)
            self._desired[key] = value
        self._dirty.set()
        if not self._away:
            await asyncio.shield(self._attempt)

    def on_change(self, process: ProcessObject | None, *, after_outage: bool) -> None:
        """Compare the object that the server has with this process's records."""
        if not self._uid:
            return
        if process is None:
            self._lose()
        elif process.records != self._written and (after_outage or process.version > self._version):
            self._written = dict(process.records)
            self._version = process.version
            self._dirty.set()

    async def run(self) -> None:
        """Write what is to be written until cancelled."""
        backoff = Backoff(RETRY_S, MAX_RETRY_S, 0.5)
        rng, last_s = Random(), 0.0
        while True:
            await self._dirty.wait()
            await asyncio.sleep(max(0.0, last_s + GATHER_S - time.monotonic()))
            self._dirty.clear()
            attempt, self._attempt = self._attempt, asyncio.get_running_loop().create_future()
            delay_s = 0.0
            try:
                await self._flush()
                self._away = False
                backoff.reset()
            except PlaneUnavailable as error:
                self._away = True
                self._dirty.set()
                delay_s = max(backoff.next_s(rng), error.retry_after_s or 0.0)
            finally:
                attempt.set_result(None)
            last_s = time.monotonic()
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Delete the object, if the server can be reached."""
        if not self._attempt.done():
            self._attempt.set_result(None)
        if self._uid:
            uid, self._uid = self._uid, ""
            with suppress(PlaneUnavailable):
                await delete_object(self._link, self._path, self.name, uid)

    async def _flush(self) -> None:
        desired = self._desired.copy()
        if not self._uid:
            if desired:
                await self._create(desired)
            return
        changes: dict[str, str | None] = {
            key: _encode(value) for key, value in desired.items() if self._written.get(key) != value
        }
        changes |= dict.fromkeys(self._written.keys() - desired.keys())
        if not changes:
            return
        with AllowedStatuses(NOT_FOUND):
            await self._patch(changes)
            self._written = desired
            return
        self._lose()
        await self._create(desired)

    async def _create(self, desired: dict[str, bytes]) -> None:
        """Create the object. An answer that was lost leaves one that exists."""
        owner = {"apiVersion": "v1", "kind": "Pod", "name": self._pod.name, "uid": self._pod.uid}
        records = {key: _encode(value) for key, value in desired.items()}
        body = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoWorkerMetadata",
            "metadata": {"name": self.name, "labels": self._labels, "ownerReferences": [owner]},
            "spec": {"data": {"records": records, "process": self._identity}},
        }
        with AllowedStatuses(CONFLICT):
            self._remember(await self._link.request("POST", self._path, body))
            self._written = desired
            return
        await self._patch(records)
        self._written = desired

    async def _patch(self, records: Mapping[str, str | None]) -> None:
        body = {"spec": {"data": {"records": records}}}
        path = f"{self._path}/{self.name}"
        self._remember(await self._link.request("PATCH", path, body, content_type=MERGE_PATCH))

    def _remember(self, answer: bytes) -> None:
        metadata: Mapping[str, Any] = msgspec.json.decode(answer)["metadata"]
        self._uid = metadata["uid"]
        self._version = int(metadata["resourceVersion"])

    def _lose(self) -> None:
        """Report that the object is gone, and have it created again."""
        self._uid = ""
        self._written = {}
        self._dirty.set()
        self._on_lost()

    def _check(self, key: str, value: bytes) -> None:
        """Raise if the record cannot be written."""
        if not (self._pod.name and self._pod.uid):
            raise Unsupported(
                f"record {key[:100]!r} cannot be put: this process is in no pod and may only watch",
                hint="run it in a pod with POD_NAME, POD_NAMESPACE and POD_UID, or use discovery "
                "by etcd or files",
            )
        others = (item for item in self._desired.items() if item[0] != key)
        size = sum(_size(*item) for item in others) + _size(key, value)
        if size > MAX_BYTES:
            raise TooLarge(
                f"record {key[:100]!r} of {len(value)} bytes makes the records of this process "
                f"larger than {MAX_BYTES}"
            )


async def delete_object(link: KubernetesLink, path: str, name: str, uid: str) -> None:
    """Delete an object unless another one has taken its name. Raises `PlaneUnavailable`."""
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
    with AllowedStatuses(NOT_FOUND, CONFLICT):
        await link.request("DELETE", f"{path}/{name}", body)


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) * 4 // 3 + 8
