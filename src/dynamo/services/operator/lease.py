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


class LeaseTimes(msgspec.Struct, frozen=True):
    """The seconds of a Lease: how long it lasts, for how long a holder that cannot renew it goes on
    writing, and how often it is renewed."""

    duration_s: int = 15
    renew_limit_s: float = 10.0
    retry_s: float = 2.0


class LeaderLease:
    """Holds or waits for the Lease. A holder stops writing before it ends for others: these count
    its duration from when they saw the last renewal, with their own clocks."""

    def __init__(
        self,
        link: KubernetesLink,
        namespace: str,
        identity: str,
        clock: Clock,
        times: LeaseTimes,
    ) -> None:
        self._link = link
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{NAME}"
        self._identity = identity
        self._clock = clock
        self._times = times
        self._renewed = -1e9
        self._seen: Mapping[str, Any] = {}
        self._seen_at = 0.0
        self._transitions = 0
        self._version = ""
        self.acquired = asyncio.Event()
        self.lost = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """Whether this process may write."""
        return self._clock.now() < self._renewed + self._times.renew_limit_s

    async def run(self) -> None:
        """Acquire and renew the Lease until cancelled."""
        rng = Random()
        failure = ""
        while True:
            try:
                await self._step()
                failure = ""
            except PlaneUnavailable as error:
                if error.message != failure:
                    failure = error.message
                    log.warning("no lease for the operator", extra={"fields": {"error": failure}})
            if not self.is_held and self.acquired.is_set():
                self.acquired.clear()
                self.lost.set()
                log.warning("the lease of the operator was lost")
            wait_s = self._times.retry_s * (1 if self.is_held else 1 + 0.2 * rng.random())
            await self._clock.sleep(wait_s)

    async def _step(self) -> None:
        """Renew the Lease, or take it if it is free or has ended."""
        now = self._clock.now()
        if self.acquired.is_set():
            with AllowedStatuses(NOT_FOUND, CONFLICT):
                await self._write("PUT", self._path, now)
                return
            self._version = ""  # somebody else has written it
        lease = await self._read()
        if lease is None:
            await self._take("POST", self._collection, now)
            return
        spec = lease.get("spec") or {}
        self._version = lease["metadata"]["resourceVersion"]
        if spec != self._seen:
            self._seen, self._seen_at = spec, now
        holder = spec.get("holderIdentity") or ""
        ends = self._seen_at + (spec.get("leaseDurationSeconds") or self._times.duration_s)
        if holder and holder != self._identity:
            self._renewed = -1e9
            if now < ends:
                return
        self._transitions = (spec.get("leaseTransitions") or 0) + (holder != self._identity)
        await self._take("PUT", self._path, now)

    async def _take(self, method: str, path: str, now: float) -> None:
        # NOT_FOUND of a POST: the namespace is not there
        with AllowedStatuses(CONFLICT, *((NOT_FOUND,) if method == "PUT" else ())):
            await self._write(method, path, now)
            self.lost.clear()
            self.acquired.set()

    async def _read(self) -> Mapping[str, Any] | None:
        with AllowedStatuses(NOT_FOUND):
            body = await self._link.request("GET", self._path)
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
        if not self.is_held:
            return
        self.acquired.clear()
        try:
            await wait_at_most(self._write("PUT", self._path, -1e9, holder=""), self._times.retry_s)
        except PlaneUnavailable as error:
            log.debug("lease", extra={"fields": {"error": error.message}})
        self._renewed = -1e9
