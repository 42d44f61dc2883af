"""The kinds of group nvidia.com, by the names of NVIDIA Dynamo 1.6. The schemas of the committed
manifests are made from these types (`crds.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from dynamo.operations.placement.quantity import PATTERN

GROUP = "nvidia.com"
GRAPH = "DynamoGraphDeployment"
ADAPTER = "DynamoGraphDeploymentScalingAdapter"
METADATA = "DynamoWorkerMetadata"
BETA, ALPHA = "v1beta1", "v1alpha1"
NAME = r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$"
MAX_COMPONENTS = 25
WORKER_TYPES = ("worker", "prefill", "decode")

ComponentType = Literal[
    "frontend", "worker", "prefill", "decode", "planner", "epp", "router", "modelstore"
]
RestartType = Literal["Sequential", "Parallel"]
Backend = Literal["sglang", "vllm", "trtllm", "native", "mock"]
OPEN = {"x-kubernetes-preserve-unknown-fields": True}


def rule(text: str, message: str, **more: Any) -> dict[str, Any]:
    """Return a validation rule of the API server (CEL)."""
    return {"rule": text, "message": message, **more}


Open = Annotated[dict[str, Any], Meta(extra_json_schema=OPEN)]
"""An object with any fields."""
Count = Annotated[int, Meta(ge=0, le=100_000)]
Quantity = Annotated[
    int | str,
    Meta(extra_json_schema={**OPEN, "pattern": f"^{PATTERN}$"}),
]
"""Without x-kubernetes-int-or-string: Kubernetes 1.20 applies kinds that have it by whole lists,
not by their fields."""
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
ComponentName = Annotated[str, Meta(pattern=NAME, min_length=1, max_length=63)]


class Multinode(Struct, frozen=True, rename="camel"):
    """A replica of several pods, one a node."""

    node_count: Annotated[int, Meta(ge=2, le=1024)]


class TopologyConstraint(Struct, frozen=True, rename="camel"):
    """Where the pods of a graph are packed: the label of a level, or the name of one."""

    cluster_topology_name: Annotated[str, Meta(max_length=253)] = ""
    pack_domain: Annotated[str, Meta(max_length=316)] = ""


class ScalingAdapterRef(Struct, frozen=True, rename="camel"):
    """Present: the number of replicas is that of a scaling adapter."""

    enabled: bool = True


class CompilationCache(Struct, frozen=True, rename="camel"):
    """A claim that keeps compiled kernels."""

    pvc_name: Annotated[str, Meta(min_length=1, max_length=253)]
    mount_path: Annotated[str, Meta(max_length=4096)] = ""


class ComponentSpec(Struct, frozen=True, rename="camel", kw_only=True):
    """A part of a graph: equal pods of one kind."""

    name: ComponentName
    type: ComponentType | None = None
    replicas: Count = 1
    min_available: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    multinode: Multinode | None = None
    pod_template: Annotated[
        dict[str, Any],
        Meta(
            description="A PodTemplateSpec. Its container `main` is the component's.",
            extra_json_schema=OPEN,
        ),
    ] = {}
    shared_memory_size: Quantity | None = None
    model_ref: Open | None = None
    scaling_adapter: ScalingAdapterRef | None = None
    compilation_cache: CompilationCache | None = None
    topology_constraint: TopologyConstraint | None = None
    frontend_sidecar: Annotated[str, Meta(max_length=63)] | None = None
    runtime_version_override: Annotated[str, Meta(max_length=63)] | None = None
    global_dynamo_namespace: bool | None = None
    roles: Annotated[list[Open], Meta(max_length=25)] | None = None
    dynamo_sidecar: Annotated[str, Meta(max_length=63)] | None = None
    provider_override: Open | None = None
    epp_config: Open | None = None
    experimental: Open | None = None


COMPONENT_RULES = [
    rule(
        "!has(self.eppConfig) || (has(self.type) && self.type == 'epp')",
        "eppConfig may only be set with the type epp",
    ),
    rule(
        "!has(self.minAvailable) || self.replicas == 0 || self.minAvailable <= self.replicas",
        "minAvailable must not exceed replicas, unless these are 0",
    ),
    rule(
        "!has(oldSelf.minAvailable) || "
        "(has(self.minAvailable) && self.minAvailable == oldSelf.minAvailable)",
        "minAvailable is immutable",
    ),
    rule(
        "!has(oldSelf.type) || (has(self.type) && self.type == oldSelf.type)", "type is immutable"
    ),
]


class RestartStrategy(Struct, frozen=True, rename="camel"):
    """The order in which components restart."""

    type: RestartType = "Sequential"
    order: Annotated[list[ComponentName], Meta(max_length=MAX_COMPONENTS)] = []


class Restart(Struct, frozen=True, rename="camel"):
    """A restart of all pods: a new `id` orders one."""

    id: Annotated[str, Meta(min_length=1, max_length=253)]
    strategy: RestartStrategy | None = None


class GraphSpec(Struct, frozen=True, rename="camel", kw_only=True):
    """A graph: its components (v1beta1), or its services (v1alpha1)."""

    components: Annotated[
        list[
            Annotated[
                ComponentSpec, Meta(extra_json_schema={"x-kubernetes-validations": COMPONENT_RULES})
            ]
        ],
        Meta(
            max_length=MAX_COMPONENTS,
            min_length=1,
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
        ),
    ] = []
    services: (
        Annotated[
            dict[str, Open],
            Meta(
                description="v1alpha1: components by name.",
                max_length=MAX_COMPONENTS,
                min_length=1,
            ),
        ]
        | None
    ) = None
    env: Annotated[list[Open], Meta(max_length=1000)] = []
    envs: Annotated[list[Open], Meta(description="v1alpha1: env.", max_length=1000)] | None = None
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    priority_class_name: Annotated[str, Meta(max_length=253)] = ""
    backend_framework: Backend | None = None
    restart: Restart | None = None
    topology_constraint: TopologyConstraint | None = None
    pvcs: Annotated[list[Open], Meta(max_length=100)] | None = None
    provider_override: Open | None = None
    experimental: Open | None = None


class Condition(Struct, rename="camel", omit_defaults=True):
    """A condition of Kubernetes."""

    type: Annotated[str, Meta(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(max_length=1024)] = ""
    message: Annotated[str, Meta(max_length=32768)] = ""
    observed_generation: int = 0
    last_transition_time: Time = ""


class ComponentStatus(Struct, rename="camel", omit_defaults=True):
    """The pods of a component, and the objects that make them."""

    component_kind: str
    component_names: list[str] = []
    replicas: int = 0
    updated_replicas: int = 0
    ready_replicas: int = 0
    available_replicas: int = 0


class RollingUpdate(Struct, rename="camel", omit_defaults=True):
    """An update of the workers. `from_` has the replicas of the other generations before it."""

    phase: Literal["Pending", "InProgress", "Completed", "Failed"]
    start_time: Time = ""
    end_time: Time = ""
    updated_components: list[str] = []
    to: str = ""
    from_: dict[str, int] = {}
    progress_time: Time = ""


class RestartStatus(Struct, rename="camel", omit_defaults=True):
    """The restart that was ordered last."""

    observed_id: str = ""
    phase: Literal["Pending", "Restarting", "Completed", "Failed"] = "Pending"
    in_progress: list[str] = []


class GraphStatus(Struct, rename="camel", omit_defaults=True):
    """The state of a graph, and why."""

    observed_generation: int = 0
    state: Literal["initializing", "pending", "successful", "failed"] = "initializing"
    conditions: Annotated[
        list[Condition],
        Meta(
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            }
        ),
    ] = []
    components: dict[str, ComponentStatus] = {}
    restart: RestartStatus | None = None
    rolling_update: RollingUpdate | None = None
    placement: Open | None = None


class GraphRef(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A component of a graph. `serviceName` is its name in v1alpha1."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    component_name: ComponentName | None = None
    service_name: ComponentName | None = None


class AdapterSpec(Struct, frozen=True, rename="camel"):
    """The replicas of a component, for autoscalers."""

    dgd_ref: GraphRef
    replicas: Count


class AdapterStatus(Struct, rename="camel", omit_defaults=True):
    """The replicas that there are, and the selector of their pods."""

    replicas: Count = 0
    selector: str = ""
    last_scale_time: Time = ""


class MetadataSpec(Struct, frozen=True):
    """The records of a process."""

    data: Open = {}


class CustomKind(Struct, frozen=True):
    """A kind and its schemas. `versions` are those served, the first one is stored. `rules` are of
    the spec."""

    kind: str
    short: str
    versions: Sequence[str]
    spec: type
    status: type | None = None
    columns: Sequence[tuple[str, str, str]] = ()
    rules: Sequence[Mapping[str, Any]] = ()
    scale: Mapping[str, str] = {}

    @property
    def plural(self) -> str:
        """Return the name in paths."""
        return f"{self.kind.lower()}s"


AGE = ("Age", "date", ".metadata.creationTimestamp")
KINDS = (
    CustomKind(
        GRAPH,
        "dgd",
        (BETA, ALPHA),
        GraphSpec,
        GraphStatus,
        columns=(
            ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
            ("Backend", "string", ".spec.backendFramework"),
            AGE,
        ),
        rules=(
            rule(
                "has(self.components) != has(self.services)",
                "exactly one of components (v1beta1) and services (v1alpha1) must be set",
            ),
            rule(
                "!has(self.components) || "
                "self.components.filter(c, has(c.type) && c.type == 'epp').size() <= 1",
                "at most one component may have the type epp",
            ),
            rule(
                "!has(self.components) || self.components.all(a, self.components.exists_one(b, "
                "a.name.lowerAscii() == b.name.lowerAscii()))",
                "names of components must differ in more than upper and lower case",
            ),
            rule(
                "oldSelf.hasValue() || !has(self.restart)",
                "restart must not be set on a new graph",
                optionalOldSelf=True,
            ),
        ),
    ),
    CustomKind(
        ADAPTER,
        "dgdsa",
        (BETA, ALPHA),
        AdapterSpec,
        AdapterStatus,
        columns=(
            ("DGD", "string", ".spec.dgdRef.name"),
            ("COMPONENT", "string", ".spec.dgdRef.componentName"),
            ("REPLICAS", "integer", ".status.replicas"),
            ("AGE", "date", ".metadata.creationTimestamp"),
        ),
        rules=(
            rule(
                "has(self.dgdRef.componentName) != has(self.dgdRef.serviceName)",
                "exactly one of dgdRef.componentName and dgdRef.serviceName must be set",
            ),
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    ),
    CustomKind(METADATA, "dwm", (ALPHA,), MetadataSpec, columns=(AGE,)),
)
"""The kinds that this project serves. Others of NVIDIA Dynamo's are left out on purpose."""
