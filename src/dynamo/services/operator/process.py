"""The process of the operator: checks the cluster, waits for the Lease, reconciles graphs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from secrets import token_hex
from typing import Any, Self

import msgspec

from dynamo.communication.kubernetes.link import (
    NOT_FOUND,
    ApiServerError,
    KubernetesLink,
    open_link,
)
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.tasks import BackgroundTasks, wait_at_most
from dynamo.operations.operator.crds import MANAGED_BY, MANAGER, PART_OF
from dynamo.operations.operator.kinds import GROUP, KINDS
from dynamo.operations.operator.pods import PodOptions
from dynamo.runtime.processes.process import run_on_loop
from dynamo.services.operator.lease import LeaderLease, LeaseTimes
from dynamo.services.operator.loop import OperatorLoop
from dynamo.telemetry.logs import configure_logging

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
