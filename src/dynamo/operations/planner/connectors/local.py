"""The connector `local`: the workers of the supervisor that runs the planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import DECODE_ERRORS, NotFound, WorkerFailed
from dynamo.core.values import ROLES_BY_NAME
from dynamo.models.embedding_model import EMBED_ENDPOINT, EMBEDDING_COMPONENT
from dynamo.operations.planner.connectors.connector import Connector
from dynamo.operations.planner.values import KindState, Order
from dynamo.runtime.calls.instances import Instance, decode_instance, instances_prefix
from dynamo.runtime.deployment import deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.control import ControlRequest, start_control_request
from dynamo.runtime.supervisors import SUPERVISOR_KEY, SUPERVISORS_PREFIX, SupervisorRecord

ACCEPT_S = 1.0
"""An order without an error after this time is being carried out."""
WORKER_COMPONENT = "worker"
MOVES_KV = ("transfer", "kv_connector")
"""Capabilities of workers that compute prompts for each other, and so can take other roles."""
ROLE_NAMES: Mapping[tuple[str, ...], Any] = {roles: name for name, roles in ROLES_BY_NAME.items()}


class LocalConnector(Connector):
    """Orders the supervisor by control requests, and workers to take roles."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._folder = deployment_of(runtime.settings).folder
        self._numbers: set[int] = set()
        self._roles: dict[str, str] = {}
        """The roles that processes were ordered to have."""
        self._embedding: set[str] = set()
        """Kinds that compute embeddings, which no policy counts."""

    async def observe(self) -> Mapping[str, KindState]:
        workers = await self._read()
        for kind, instances in workers.homes.items():
            for instance in instances:  # a restarted one has the role of its settings again
                role = self._roles.get(_process(instance))
                if role not in {None, workers.role_of(instance, kind)}:
                    await self._set_role(instance, str(role))
                    workers = await self._read()
        return workers.kinds()

    async def scale(self, order: Order) -> None:
        if order.number in self._numbers:
            return
        workers = await self._read()
        kinds = workers.kinds()
        if order.kind not in kinds or order.takes_from not in {"", *kinds}:
            raise NotFound(f"no kind of workers is called {order.kind or order.takes_from}")
        state = kinds[order.kind]
        more = order.count - state.wanted
        if order.takes_from:
            for instance in workers.acting(order.takes_from)[: max(0, more)]:
                await self._set_role(instance, state.role)
        else:
            leaving = max(0, -more - state.starting) if state.pool else 0
            if more + leaving:
                home = workers.record.kinds[order.kind]
                size = home.ready + home.sleeping + home.starting + more + leaving
                await self._request(ControlRequest("scale", order.kind, size))
            for instance in workers.acting(order.kind)[:leaving]:
                await self._request(ControlRequest("drain", instance.id))
        self._numbers.add(order.number)

    async def _read(self) -> _Workers:
        """Return the supervisor's record and its workers. Raises `NotFound`."""
        runtime = self._runtime
        supervisor = runtime.supervisor.partition("/")[0]
        records = await runtime.discovery.get(SUPERVISORS_PREFIX + supervisor)
        try:
            (value,) = records.values()
            record = msgspec.json.decode(value, type=SupervisorRecord)
        except (ValueError, *DECODE_ERRORS):
            hint = "start it by `dynamo run` or `dynamo serve` with --planner"
            raise NotFound("the planner's supervisor is not in discovery", hint=hint) from None
        homes = defaultdict(list)
        for instance in await self._instances("generate"):
            owner, _, kind = str(instance.capabilities.get(SUPERVISOR_KEY)).partition("/")
            if owner == supervisor and kind in record.kinds:
                homes[kind].append(instance)
        for instance in await self._instances(EMBED_ENDPOINT, EMBEDDING_COMPONENT):
            self._embedding.add(str(instance.capabilities.get(SUPERVISOR_KEY)).partition("/")[2])
        kinds = {name: each for name, each in record.kinds.items() if name not in self._embedding}
        return _Workers(replace(record, kinds=kinds), homes)

    async def _instances(
        self, endpoint: str, component: str = WORKER_COMPONENT
    ) -> Sequence[Instance]:
        runtime = self._runtime
        prefix = instances_prefix(runtime.settings.runtime.namespace, component, endpoint)
        records = await runtime.discovery.get(prefix)
        instances = (decode_instance(*record) for record in records.items())
        return [instance for instance in instances if instance is not None]

    async def _request(self, request: ControlRequest) -> None:
        await start_control_request(request, self._folder, ACCEPT_S)

    async def _set_role(self, instance: Instance, role: str) -> None:
        """Let a worker take a role. Raises `WorkerFailed`, and the errors of the worker."""
        same = [each for each in await self._instances("set_role") if each.id == instance.id]
        if not same:
            raise WorkerFailed(f"{instance.id} has left")
        path = f"{instance.namespace}.{WORKER_COMPONENT}.set_role"
        client = await self._runtime.endpoint(path).client()
        try:
            await client.collect(same[0], role.encode(), Context("planner"))
        finally:
            await client.close()
        self._roles[_process(instance)] = role


class _Workers(msgspec.Struct, frozen=True):
    """The record of a supervisor, and its workers by kind of process."""

    record: SupervisorRecord
    homes: Mapping[str, Sequence[Instance]]

    def kinds(self) -> Mapping[str, KindState]:
        """Return the kinds. A worker that has another role counts to the kind of its pool which has
        that role."""
        record = self.record
        kinds = {
            name: KindState(
                kind.ready + kind.starting,
                kind.ready,
                kind.starting,
                kind.draining,
                record.failing.get(name, ""),
                record.start_s.get(name, 0.0),
                kind.gpus or None,
                kind.role or "both",  # type: ignore[arg-type]
                self._model(name),
                self._pool(name),
            )
            for name, kind in record.kinds.items()
        }
        for name, instances in self.homes.items():
            for instance in instances:
                acting = self._acting_kind(instance, name)
                for kind, change in ((name, -1), (acting, 1)) if acting != name else ():
                    state = kinds[kind]
                    kinds[kind] = replace(
                        state, wanted=state.wanted + change, ready=max(0, state.ready + change)
                    )
        return kinds

    def acting(self, kind: str) -> Sequence[Instance]:
        """Return the workers that have the role of a kind, those of other kinds first."""
        keyed = [
            (home == kind, instance.id, instance)
            for home, instances in self.homes.items()
            for instance in instances
            if self._acting_kind(instance, home) == kind
        ]
        return [instance for *_, instance in sorted(keyed, key=lambda each: each[:2])]

    def role_of(self, instance: Instance, home: str) -> str:
        """Return the role that a worker has now."""
        roles = (instance.capabilities.get("engine") or {}).get("roles")
        return str(ROLE_NAMES.get(tuple(roles or ()), self.record.kinds[home].role))

    def _acting_kind(self, instance: Instance, home: str) -> str:
        role, pool = self.role_of(instance, home), self._pool(home)
        if not pool or role == self.record.kinds[home].role:
            return home
        mates = (name for name in self.record.kinds if self._pool(name) == pool)
        return next((name for name in mates if self.record.kinds[name].role == role), home)

    def _model(self, kind: str) -> str:
        models = {str(each.capabilities.get("model", "")) for each in self.homes.get(kind, ())}
        models |= {self.record.kinds[kind].model} if not models else set()
        if models == {""}:  # no worker tells: that of the others, if there is one only
            every = (instance for instances in self.homes.values() for instance in instances)
            models = {str(each.capabilities.get("model", "")) for each in every}
        return models.pop() if len(models) == 1 else ""

    def _pool(self, kind: str) -> str:
        instances = self.homes.get(kind, ())
        can = all(any(key in each.capabilities for key in MOVES_KV) for each in instances)
        split = self.record.kinds[kind].role in {"prefill", "decode"}
        return f"{self._model(kind)}/{self.record.kinds[kind].gpus}" if can and split else ""


def _process(instance: Instance) -> str:
    return instance.id.rpartition("-")[0]
