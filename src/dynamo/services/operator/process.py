"""The process of the operator: checks the cluster, waits for the Lease, reconciles graphs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from random import Random
from secrets import token_hex
from typing import Any, Self

import msgspec

from dynamo.communication.kubernetes.link import (
    CONFLICT,
    NOT_FOUND,
    AllowedStatuses,
    ApiServerError,
    KubernetesLink,
    open_link,
)
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoError, PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks, wait_at_most
from dynamo.operations.operator.crds import MANAGED_BY, MANAGER, PART_OF
from dynamo.operations.operator.kinds import GROUP, KINDS
from dynamo.operations.operator.pods import PodOptions
from dynamo.runtime.processes.process import run_on_loop
from dynamo.services.operator.loop import OperatorLoop
from dynamo.telemetry.logs import configure_logging

NAME = "dynamo-operator"
CLUSTER_NAMESPACE = "kube-system"
LEASES = "/apis/coordination.k8s.io/v1"
MAX_DURATION_S = 60
"""A Lease that is not renewed ends after this time. Users of a namespace may write Leases there."""


class LeaseTimes(msgspec.Struct, frozen=True):
    """The seconds of a Lease: how long it lasts, for how long a holder that cannot renew it goes on
    writing, and how often it is renewed."""

    duration_s: int = 15
    renew_limit_s: float = 10.0
    retry_s: float = 2.0


class LeaderLease:
    """Holds or waits for the Lease. A holder stops writing before it ends for others: these count
    its duration from when they saw the last renewal, with their own clocks.

    The Lease of an operator of all namespaces ("") is in kube-system, that of an operator of one
    namespace is there. The two kinds exclude each other. Each writes its own Lease before it looks
    for a valid one of the other kind, so that at most one of them finds none, and leads.
    """

    def __init__(
        self,
        link: KubernetesLink,
        namespace: str,
        identity: str,
        clock: Clock,
        times: LeaseTimes,
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._collection = f"{LEASES}/namespaces/{namespace or CLUSTER_NAMESPACE}/leases"
        self._path = f"{self._collection}/{NAME}"
        self._identity = identity
        self._clock = clock
        self._times = times
        self._owns = False
        self._renewed = -1e9
        self._seen: dict[str, tuple[Mapping[str, Any], float]] = {}
        """By namespace: the Lease as it was last written, and since when it is seen so."""
        self._transitions = 0
        self._version = ""
        self.acquired = asyncio.Event()
        self.lost = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """Whether this process may write."""
        return self.acquired.is_set() and self._is_renewed

    @property
    def _is_renewed(self) -> bool:
        return self._clock.now() < self._renewed + self._times.renew_limit_s

    async def run(self) -> None:
        """Acquire and renew the Lease until cancelled."""
        rng = Random()
        failure = ""
        while True:
            try:
                reason = await self._step()
            except PlaneUnavailable as error:
                reason = error.message
            if reason and reason != failure:
                log.warning("no lease for the operator", extra={"fields": {"error": reason}})
            failure = reason
            if not self._is_renewed and self.acquired.is_set():
                self.acquired.clear()
                self.lost.set()
                log.warning("the lease of the operator was lost")
            wait_s = self._times.retry_s * (1 if self.is_held else 1 + 0.2 * rng.random())
            await self._clock.sleep(wait_s)

    async def _step(self) -> str:
        """Renew the Lease, or take it if it is free or has ended. Returns which operator of another
        Lease this one waits for."""
        if not self.acquired.is_set() and self._namespace and (other := await self._find_other()):
            await self.release()
            return other
        await self._renew_or_take()
        if not self._owns or self.acquired.is_set():
            return ""
        if not (other := await self._find_other()):
            self.lost.clear()
            self.acquired.set()
        return other

    async def _renew_or_take(self) -> None:
        now = self._clock.now()
        if self._owns:
            with AllowedStatuses(NOT_FOUND, CONFLICT):
                await self._write("PUT", self._path, now)
                return
            self._owns = False  # somebody else has written it
            self._version = ""
        lease = await self._read()
        if lease is None:
            await self._take("POST", self._collection, now)
            return
        spec = lease.get("spec") or {}
        self._version = lease["metadata"]["resourceVersion"]
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self._identity:
            self._renewed = -1e9
            if self._is_valid(lease):
                return
        self._transitions = (spec.get("leaseTransitions") or 0) + (holder != self._identity)
        await self._take("PUT", self._path, now)

    def _is_valid(self, lease: Mapping[str, Any]) -> bool:
        """Whether a Lease has a holder and has not ended."""
        namespace, spec = lease["metadata"]["namespace"], lease.get("spec") or {}
        if namespace not in self._seen or self._seen[namespace][0] != spec:
            self._seen[namespace] = spec, self._clock.now()
        duration_s = min(spec.get("leaseDurationSeconds") or 0, MAX_DURATION_S)
        ends = self._seen[namespace][1] + duration_s
        return bool(spec.get("holderIdentity")) and self._clock.now() < ends

    async def _find_other(self) -> str:
        """Return what is to be said of an operator whose Lease excludes this one, "" for none."""
        if self._namespace:
            lease = await self._read(f"{LEASES}/namespaces/{CLUSTER_NAMESPACE}/leases/{NAME}")
            leases = [lease] if lease else []
        else:
            path = f"{LEASES}/leases?fieldSelector=metadata.name%3D{NAME}"
            leases = msgspec.json.decode(await self._link.request("GET", path))["items"]
        for lease in leases:
            where = lease["metadata"]["namespace"]
            if where != (self._namespace or CLUSTER_NAMESPACE) and self._is_valid(lease):
                scope = "all namespaces" if self._namespace else f"namespace {where}"
                holder = lease["spec"]["holderIdentity"]
                return f"{holder} is the operator of {scope} (Lease {where}/{NAME}): stop it first"
        return ""

    async def _take(self, method: str, path: str, now: float) -> None:
        # NOT_FOUND of a POST: the namespace is not there
        with AllowedStatuses(CONFLICT, *((NOT_FOUND,) if method == "PUT" else ())):
            await self._write(method, path, now)
            self._owns = True

    async def _read(self, path: str = "") -> Mapping[str, Any] | None:
        with AllowedStatuses(NOT_FOUND):
            body = await self._link.request("GET", path or self._path)
            lease: Mapping[str, Any] = msgspec.json.decode(body)
            return lease
        return None

    async def _write(self, method: str, path: str, now: float, holder: str | None = None) -> None:
        """Write the Lease. The time of a renewal is that of the request, not of the answer."""
        wall = datetime.fromtimestamp(self._clock.wall(), UTC)
        body: dict[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME},
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": self._times.duration_s,
                "renewTime": wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "leaseTransitions": self._transitions,
            },
        }
        if method == "PUT":
            body["metadata"]["resourceVersion"] = self._version
        answer = msgspec.json.decode(await self._link.request(method, path, body))
        self._version = answer["metadata"]["resourceVersion"]
        self._renewed = now

    async def release(self) -> None:
        """Give the Lease back, so that another operator takes it at once."""
        if not self._owns or not self._is_renewed:
            return
        self.acquired.clear()
        self._owns = False
        try:
            await wait_at_most(self._write("PUT", self._path, -1e9, holder=""), self._times.retry_s)
        except PlaneUnavailable as error:
            log.debug("lease", extra={"fields": {"error": error.message}})
        self._renewed = -1e9


log = logging.getLogger(__name__)
REQUEST_S = 5.0
CLOSE_S = 5.0


class GraphOperator:
    """An operator. `async with` starts it; it reconciles while it holds the Lease."""

    def __init__(
        self,
        link: KubernetesLink,
        clock: Clock,
        options: PodOptions,
        namespace: str = "",
        times: LeaseTimes | None = None,
    ) -> None:
        """`namespace`: only graphs of it; "": of all."""
        self._link = link
        identity = f"{os.environ.get('POD_NAME') or os.uname().nodename}-{token_hex(4)}"
        self.lease = LeaderLease(link, namespace, identity, clock, times or LeaseTimes())
        self.loop = OperatorLoop(
            link, namespace, clock, options, may_write=lambda: self.lease.is_held
        )
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Self:
        """Check the cluster and follow it. Raises `ConfigError` and `PlaneUnavailable`."""
        await self.loop.cluster.read_version()
        await check_kinds(self._link)
        await self.loop.start()
        self._tasks.start(self.lease.run(), "lease")
        self._tasks.start(self._follow_lease(), "leadership")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.loop.close()
        await self._tasks.close()
        await wait_at_most(self.lease.release(), CLOSE_S)

    async def _follow_lease(self) -> None:
        """Reconcile while the Lease is held."""
        while True:
            await self.lease.acquired.wait()
            log.info("this operator leads")
            self.loop.lead()
            await self.lease.lost.wait()
            self.loop.stop_leading()


async def check_kinds(link: KubernetesLink) -> None:
    """Raise `ConfigError` for kinds that are missing, or another operator's."""
    for kind in KINDS:
        name = f"{kind.plural}.{GROUP}"
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        try:
            item: Any = msgspec.json.decode(await link.request("GET", path))
        except ApiServerError as error:
            if error.status != NOT_FOUND:
                raise
            raise ConfigError(
                f"the cluster has no kind {name}",
                hint="dynamo kubernetes crds | kubectl apply --server-side -f -",
            ) from None
        labels = item["metadata"].get("labels") or {}
        manager = labels.get(MANAGED_BY, MANAGER)
        if MANAGER not in (manager, labels.get(PART_OF)):
            raise ConfigError(
                f"{name} is managed by {manager}, and one operator a cluster is all",
                hint="remove that operator and its kinds, or use it instead",
            )


def run_operator(namespace: str, options: PodOptions, level: str = "info") -> int:
    """Run an operator until SIGTERM or SIGINT, and return its exit code."""
    configure_logging(level, "text", "operator", sys.stderr)
    return run_on_loop(_run(namespace, options))


async def _run(namespace: str, options: PodOptions) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    link = open_link(REQUEST_S)
    try:
        async with GraphOperator(link, SystemClock(), options, namespace):
            await stopping.wait()
    except DynamoError as error:
        fields = {"error": error.message, **({"hint": error.hint} if error.hint else {})}
        log.error("the operator cannot run", extra={"fields": fields})  # noqa: TRY400
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        await link.close()
    return 0
