"""Discovery by the API server of a Kubernetes cluster: an object for each process, owned by its
pod, and the readiness of pods in EndpointSlices."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final, Self

import msgspec

from dynamo.communication.directory import RecordChange, RecordWatch
from dynamo.communication.discovery.change_queue import ChangeQueue
from dynamo.communication.discovery.graceful_state import GracefulState
from dynamo.communication.discovery.plane import Discovery
from dynamo.communication.kubernetes.link import KubernetesLink, open_link
from dynamo.communication.kubernetes.live_records import (
    LiveRecords,
    ProcessObject,
    Readiness,
    decode_process_object,
    decode_slice,
)
from dynamo.communication.kubernetes.own_object import OwnObject, PodIdentity, delete_object
from dynamo.communication.kubernetes.reflector import ObjectChange, Reflector
from dynamo.communication.options import DEFAULT_OPTIONS, PlaneOptions
from dynamo.core.clock import Backoff
from dynamo.core.errors import ConfigError, PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks, run_all

GRAPH_LABEL: Final = "nvidia.com/dynamo-graph-deployment-name"
ENABLED_LABEL: Final = "nvidia.com/dynamo-discovery-enabled"
SLICES_GROUP: Final = "discovery.k8s.io"
RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 1.0


class KubernetesDiscovery(Discovery):
    """The backend `kubernetes:`, or `kubernetes://NAMESPACE/GRAPH` for another namespace or graph
    than those of this process's pod.

    A process has one DynamoWorkerMetadata. Its records are live while its pod is ready in a slice
    of the graph's Service for discovery. While the API server is away, watches report nothing,
    `get` raises `PlaneUnavailable`, and writes wait until the server is back.
    """

    def __init__(self, link: KubernetesLink, namespace: str, pod: PodIdentity) -> None:
        super().__init__()
        self._link = link
        graph = f"{GRAPH_LABEL}={pod.graph}" if pod.graph else f"!{GRAPH_LABEL}"
        self._path = f"/apis/nvidia.com/v1alpha1/namespaces/{namespace}/dynamoworkermetadatas"
        self._slices_path = f"namespaces/{namespace}/endpointslices"
        self._live = LiveRecords(pod.uid)
        self._state = GracefulState(self._push)
        self._queues: set[ChangeQueue] = set()
        self._objects = Reflector(
            link, self._path, decode_process_object, self._on_objects, selector=graph
        )
        self._slices = Reflector(
            link, "", decode_slice, self._on_slices, selector=f"{ENABLED_LABEL}=true,{graph}"
        )
        labels = {GRAPH_LABEL: pod.graph} if pod.graph else {}
        self._own = OwnObject(link, self._path, pod, labels, self._on_own_lost)
        self._refresh_lock = asyncio.Lock()
        self._refreshes_begun = self._refreshes_done = 0
        self._rng = Random()
        self._tasks = BackgroundTasks()
        self._closed = False
        self._tasks.start(self._objects.run(), "kubernetes records")
        self._tasks.start(self._follow_slices(), "kubernetes slices")
        self._tasks.start(self._own.run(), "kubernetes own records")
        self._tasks.start(self._delete_leftovers(), "kubernetes leftovers")

    @classmethod
    async def open(cls, url: str, options: PlaneOptions = DEFAULT_OPTIONS) -> Self:
        """Start to follow in the background. Raises `ConfigError`."""
        namespace, graph = parse_url(url)
        pod = PodIdentity.of(os.environ)
        link = open_link(options.dial_timeout_s)
        if graph:
            pod = msgspec.structs.replace(pod, graph=graph)
        return cls(link, namespace or pod.namespace or link.namespace, pod)

    @property
    def connection_error(self) -> str:
        return self._objects.connection_error or self._slices.connection_error

    async def put(self, key: str, value: bytes) -> None:
        await self._own.write(key, value)

    async def delete(self, key: str) -> None:
        await self._own.write(key, None)

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        await self._refresh()
        return {key: value for key, value in self._live.records.items() if key.startswith(prefix)}

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[RecordWatch]:
        queue = ChangeQueue(prefix)
        task = self._tasks.start(self._start_watch(queue), f"kubernetes watch {prefix}")
        try:
            yield queue
        finally:
            task.cancel()
            self._queues.discard(queue)

    async def revoke_lease_of(self, key: str) -> None:
        await self._objects.listed.wait()
        with suppress(PlaneUnavailable):  # known objects are deleted when the server is back
            await self._refresh()
        for process in tuple(self._objects.objects.values()):
            if key in process.records:
                await self._delete(process)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._tasks.close()
        self._state.close()
        await self._own.close()
        await self._link.close()

    async def _start_watch(self, queue: ChangeQueue) -> None:
        await self._until_back(self._refresh_or_know)
        queue.start(self._state.records)
        self._queues.add(queue)

    async def _refresh_or_know(self) -> None:
        """Read both kinds. While the server is away, what was read before is enough."""
        try:
            await self._refresh()
        except PlaneUnavailable:
            if not (self._objects.listed.is_set() and self._slices.listed.is_set()):
                raise

    async def _refresh(self) -> None:
        """Read both kinds as they are now. Calls that come during a read share the next one."""
        wanted = self._refreshes_begun + 1
        async with self._refresh_lock:
            if self._refreshes_done >= wanted:
                return
            self._refreshes_begun = number = self._refreshes_begun + 1
            await self._find_slices()
            await run_all(self._objects.refresh(), self._slices.refresh())
            self._refreshes_done = number

    async def _find_slices(self) -> None:
        """Find the newest version of slices that the server has. Raises `PlaneUnavailable`."""
        if not self._slices.path:
            version = await self._link.served_version(SLICES_GROUP, ("v1", "v1beta1"))
            self._slices.path = f"/apis/{SLICES_GROUP}/{version}/{self._slices_path}"

    async def _follow_slices(self) -> None:
        await self._until_back(self._find_slices)
        await self._slices.run()

    async def _delete_leftovers(self) -> None:
        """Delete the objects that ended processes of this container have left."""
        await self._objects.listed.wait()
        for process in tuple(self._objects.objects.values()):
            if self._own.is_leftover(process):
                await self._delete(process)

    async def _delete(self, process: ProcessObject) -> None:
        """Delete an object, as soon as the server is back."""
        name, uid = process.name, process.uid
        await self._until_back(lambda: delete_object(self._link, self._path, name, uid))

    async def _until_back(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work, again and again until the server can be reached."""
        backoff = Backoff(RETRY_S, MAX_RETRY_S, 0.5)
        while True:
            try:
                return await work()
            except PlaneUnavailable:
                await asyncio.sleep(backoff.next_s(self._rng))

    def _on_objects(
        self, changes: Sequence[ObjectChange[ProcessObject]], after_outage: bool
    ) -> None:
        self._apply(self._live.apply_objects(changes), after_outage)
        for change in changes:
            if change.key.rpartition("/")[2] == self._own.name:
                self._own.on_change(change.value, after_outage=after_outage)

    def _on_slices(self, changes: Sequence[ObjectChange[Readiness]], after_outage: bool) -> None:
        self._apply(self._live.apply_slices(changes), after_outage)

    def _apply(self, changes: Sequence[RecordChange], after_outage: bool) -> None:
        if after_outage:
            self._state.replace(self._live.records)
        elif changes:
            self._state.apply(changes)

    def _push(self, changes: Sequence[RecordChange]) -> None:
        for queue in self._queues:
            queue.push(changes)

    def _on_own_lost(self) -> None:
        for callback in self._lease_lost_callbacks:
            callback()


def parse_url(url: str) -> tuple[str, str]:
    """Return namespace and graph of `kubernetes:[//NAMESPACE[/GRAPH]]`. Raises `ConfigError`."""
    rest = url.partition(":")[2]
    namespace, _, graph = rest.removeprefix("//").partition("/")
    if (rest and not rest.startswith("//")) or "/" in graph.strip("/"):
        raise ConfigError(
            f"{url!r} is no URL of a discovery by Kubernetes",
            hint="write kubernetes: or kubernetes://NAMESPACE/GRAPH",
        )
    return namespace, graph.strip("/")
