"""The tables of what an installed package can extend by name: engines, plane backends, costs etc.

Each kind is one `PluginTable`. Its rows map a name to `"module:object"`, which is imported on first
use. An installed package adds a row by an entry point in the table's group::

    [project.entry-points."dynamo.engines"]
    my_engine = "my_package.engine:open_engine"

A built-in name cannot be replaced by an entry point. `docs/how-to/extend.md` has a recipe a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.core.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class PluginTable(msgspec.Struct, frozen=True):
    """Implementations of one kind by name. `kind` names the kind in messages."""

    kind: str
    group: str
    builtin: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or any(point.name == name for point in self._entry_points())

    def names(self) -> list[str]:
        """Return every usable name: the built-in ones, then those of entry points."""
        return [*self.builtin, *(point.name for point in self._entry_points())]

    def check(self, name: str) -> None:
        """Raise `ConfigError` for an unknown name."""
        if name in self:
            return
        names = self.names()
        raise ConfigError(f"unknown {self.kind} {name!r}", hint=nearest_name_hint(name, names))

    def load(self, name: str) -> Any:
        """Import and return the object behind `name`. Raises as `check`.

        An entry point that cannot be imported raises `ConfigError` with the reason. An import error
        of a built-in row is not caught.
        """
        self.check(name)
        target = self.builtin.get(name)
        if target is not None:
            module, _, attribute = target.partition(":")
            return getattr(import_module(module), attribute)
        point = next(point for point in self._entry_points() if point.name == name)
        try:
            return point.load()
        except Exception as error:
            raise ConfigError(
                f"{self.kind} {name!r} ({point.value}) cannot be imported: {error!r}"
            ) from error

    def _entry_points(self) -> Sequence[EntryPoint]:
        from importlib.metadata import entry_points  # takes 20 ms, and help needs none

        return tuple(entry_points(group=self.group))


ENGINES = PluginTable(
    "engine",
    "dynamo.engines",
    {
        "native": "dynamo.inference.torch.engine:open_engine",
        "mock": "dynamo.inference.mock.engine:open_engine",
        "echo": "dynamo.inference.echo:open_engine",
        "script": "dynamo.inference.script.engine:open_engine",
        "llamacpp": "dynamo.inference.llamacpp.engine:open_engine",
        "vllm": "dynamo.inference.vllm.engine:VllmEngine",
        "sglang": "dynamo.inference.sglang.engine:SglangEngine",
        "trtllm": "dynamo.inference.trtllm.engine:TrtllmEngine",
        "tensorrt_llm": "dynamo.inference.trtllm.engine:TrtllmEngine",
        "openai": "dynamo.inference.openai_server.factory:open_engine",
    },
)
"""`async (EngineInputs) -> Engine` (`inference/engine_registry.py`)."""

_ENGINES_WITHOUT_WEIGHTS = frozenset({"mock", "echo", "script", "openai"})

DISCOVERY_BACKENDS = PluginTable(
    "discovery backend",
    "dynamo.planes.discovery",
    {
        "memory": "dynamo.communication.discovery.memory:MemoryDiscovery",
        "file": "dynamo.communication.discovery.file:FileDiscovery",
        "etcd": "dynamo.communication.discovery.etcd:EtcdDiscovery",
        "etcds": "dynamo.communication.discovery.etcd:EtcdDiscovery",
        "kubernetes": "dynamo.communication.kubernetes.discovery:KubernetesDiscovery",
    },
)
"""URL scheme to a class with `async open(url, options) -> Discovery`."""

REQUEST_BACKENDS = PluginTable(
    "request backend",
    "dynamo.planes.requests",
    {
        "memory": "dynamo.communication.requests.memory:MemoryRequests",
        "tcp": "dynamo.communication.requests.tcp:TcpRequests",
        "nats": "dynamo.communication.requests.nats:NatsRequests",
    },
)
"""URL scheme to a class with `async open(url, options) -> Requests`."""

EVENT_BACKENDS = PluginTable(
    "event backend",
    "dynamo.planes.events",
    {
        "memory": "dynamo.communication.events.memory:MemoryEvents",
        "tcp": "dynamo.communication.events.tcp:TcpEvents",
        "nats": "dynamo.communication.events.nats:NatsEvents",
    },
)
"""URL scheme to a class with `async open(url, directory, options) -> Events`."""

TRANSFER_BACKENDS = PluginTable(
    "transfer backend",
    "dynamo.planes.transfer",
    {
        "auto": "dynamo.communication.transfer.auto:AutoTransfer",
        "shm": "dynamo.communication.transfer.shm:ShmTransfer",
        "tcp": "dynamo.communication.transfer.tcp:TcpTransfer",
        "nixl": "dynamo.communication.transfer.nixl:NixlTransfer",
        "memory": "dynamo.communication.transfer.memory:MemoryTransfer",
    },
)
"""URL scheme to a class with `async open(url, setup) -> TransferPlane`."""

SNAPSHOT_DRIVERS = PluginTable(
    "snapshot driver",
    "dynamo.snapshot_drivers",
    {"criu": "dynamo.operations.snapshot.criu:Criu"},
)
"""A class without arguments, a `SnapshotDriver` (`operations/snapshot/criu.py`)."""

ROUTER_MODES = PluginTable(
    "router mode",
    "dynamo.router.modes",
    {
        "round_robin": "dynamo.scheduling.router.factory:open_basic_policy",
        "random": "dynamo.scheduling.router.factory:open_basic_policy",
        "least_loaded": "dynamo.scheduling.router.factory:open_basic_policy",
        "power_of_two": "dynamo.scheduling.router.factory:open_basic_policy",
        "weighted_round_robin": "dynamo.scheduling.router.factory:open_basic_policy",
        "kv": "dynamo.scheduling.router.factory:open_kv_policy",
        "adaptive": "dynamo.scheduling.router.factory:open_adaptive_policy",
    },
)
"""`async (PolicyInputs) -> Policy` (`scheduling/router/policy.py`)."""

ROUTER_COSTS = PluginTable(
    "router policy",
    "dynamo.router.costs",
    {
        "predicted": "dynamo.scheduling.router.costs.predicted:PredictedCost",
        "block_cost": "dynamo.scheduling.router.costs.alternatives:BlockCost",
        "composite": "dynamo.scheduling.router.costs.alternatives:CompositeCost",
        "argmin_ttft": "dynamo.scheduling.router.costs.predicted:TtftCost",
        "affinity": "dynamo.scheduling.router.costs.alternatives:AffinityCost",
    },
)
"""A `Cost` class (`scheduling/router/costs/interface.py`); `router.policy` names it in mode kv."""

SELECTORS = PluginTable(
    "selector",
    "dynamo.router.selectors",
    {
        "highest_score": "dynamo.scheduling.router.selectors:DefaultWorkerSelector",
        "weighted_random": "dynamo.scheduling.router.selectors:DefaultWorkerSelector",
        "proportional": "dynamo.scheduling.router.selectors:DefaultWorkerSelector",
        "load_balanced": "dynamo.scheduling.router.selectors:DefaultWorkerSelector",
    },
)
"""A `WorkerSelector` class; those of entry points are made without arguments."""

OPERATORS = PluginTable(
    "token operator",
    "dynamo.operators",
    {
        "admission": "dynamo.scheduling.admission:Admission",
        "migration": "dynamo.scheduling.migration:Migration",
    },
)
"""`async (OperatorInputs) -> Operator` (`scheduling/pipeline.py`). The built-in rows are stages of
the pipeline of a model, listed in the order in which a request passes them."""

PLANNER_POLICIES = PluginTable(
    "planner policy",
    "dynamo.planner.policies",
    {
        "flow": "dynamo.operations.planner.policies.flow:FlowPolicy",
        "rule": "dynamo.operations.planner.policies.simple:RulePolicy",
        "throughput": "dynamo.operations.planner.policies.simple:ThroughputPolicy",
        "load": "dynamo.operations.planner.policies.simple:LoadPolicy",
        "static": "dynamo.operations.planner.policies.simple:StaticPolicy",
    },
)
"""A `Policy` class (`operations/planner/policies/policy.py`); `planner.policy` names it."""

PLANNER_PREDICTORS = PluginTable(
    "planner predictor",
    "dynamo.planner.predictors",
    {
        "adaptive": "dynamo.operations.planner.predictors:adaptive",
        "constant": "dynamo.operations.planner.predictors:constant",
        "moving_average": "dynamo.operations.planner.predictors:moving_average",
        "kalman": "dynamo.operations.planner.predictors:kalman",
        "arima": "dynamo.operations.planner.predictors:arima",
    },
)
"""A `Predictor` (`operations/planner/predictors.py`); `planner.predictor` names it."""

PLANNER_CONNECTORS = PluginTable(
    "planner connector",
    "dynamo.planner.connectors",
    {
        "local": "dynamo.operations.planner.connectors.local:LocalConnector",
        "kubernetes": "dynamo.operations.planner.connectors.kubernetes:KubernetesConnector",
        "virtual": "dynamo.operations.planner.connectors.virtual:VirtualConnector",
    },
)
"""A `Connector` class (`operations/planner/connectors/connector.py`) that is made with the
`DistributedRuntime`; `planner.connector` names it."""


def engine_needs_weights(kind: str) -> bool:
    """Return whether an engine reads the model's weights.

    An engine of an entry point needs them unless its factory has `needs_weights = False`. Raises as
    `PluginTable.check`.
    """
    if kind in ENGINES.builtin:
        return kind not in _ENGINES_WITHOUT_WEIGHTS
    return bool(getattr(ENGINES.load(kind), "needs_weights", True))
