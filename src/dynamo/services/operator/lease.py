"""Leadership by a Lease: one operator writes, others wait until its Lease has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec

from dynamo.communication.kubernetes.link import (
    CONFLICT,
    NOT_FOUND,
    AllowedStatuses,
    KubernetesLink,
)
from dynamo.core.clock import Clock
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import wait_at_most

log = logging.getLogger(__name__)
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
