"""The kinds that the cluster serves: built-in ones as a table, others from their definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Column:
    """A column of `kubectl get`. `path` is a JSONPath such as `.spec.replicas`."""

    name: str
    path: str
    type: str = "string"


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of objects. `versions` begins with the one that objects are stored in.

    `schemas` has the schema of each version of a custom kind; built-in kinds have none.
    """

    group: str
    versions: tuple[str, ...]
    plural: str
    name: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    singular: str = ""
    categories: tuple[str, ...] = ()
    has_status: bool = True
    scale: tuple[str, str, str] | None = None
    """Paths of the wanted number, the present number and the selector."""
    columns: dict[str, list[Column]] = field(default_factory=dict)
    schemas: dict[str, Object] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The name of the kind in the store."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def api_version(self, version: str) -> str:
        """Return the `apiVersion` of objects."""
        return f"{self.group}/{version}" if self.group else version


_SCALE = (".spec.replicas", ".status.replicas", ".status.selector")
_READY = Column("Ready", ".status.readyReplicas", "integer")

BUILT_IN = (
    Kind("", ("v1",), "namespaces", "Namespace", namespaced=False, short=("ns",)),
    Kind("", ("v1",), "nodes", "Node", namespaced=False, short=("no",)),
    Kind("", ("v1",), "pods", "Pod", short=("po",), categories=("all",),
         columns={"v1": [Column("Status", ".status.phase"), Column("Node", ".spec.nodeName")]}),
    Kind("", ("v1",), "services", "Service", short=("svc",), categories=("all",)),
    Kind("", ("v1",), "configmaps", "ConfigMap", short=("cm",), has_status=False),
    Kind("", ("v1",), "secrets", "Secret", has_status=False),
    Kind("", ("v1",), "serviceaccounts", "ServiceAccount", short=("sa",), has_status=False),
    Kind("", ("v1",), "events", "Event", short=("ev",), has_status=False),
    Kind("", ("v1",), "persistentvolumeclaims", "PersistentVolumeClaim", short=("pvc",)),
    Kind("", ("v1",), "resourcequotas", "ResourceQuota", short=("quota",)),
    Kind("apps", ("v1",), "deployments", "Deployment", short=("deploy",), categories=("all",),
         scale=_SCALE, columns={"v1": [_READY]}),
    Kind("apps", ("v1",), "replicasets", "ReplicaSet", short=("rs",), categories=("all",),
         scale=_SCALE, columns={"v1": [_READY]}),
    Kind("apps", ("v1",), "statefulsets", "StatefulSet", short=("sts",), scale=_SCALE),
    Kind("batch", ("v1",), "jobs", "Job", categories=("all",)),
    Kind("discovery.k8s.io", ("v1",), "endpointslices", "EndpointSlice", has_status=False),
    Kind("events.k8s.io", ("v1",), "events", "Event", short=("ev",), has_status=False),
    Kind("coordination.k8s.io", ("v1",), "leases", "Lease", has_status=False),
    Kind("policy", ("v1",), "poddisruptionbudgets", "PodDisruptionBudget", short=("pdb",)),
    Kind("networking.k8s.io", ("v1",), "networkpolicies", "NetworkPolicy", short=("netpol",),
         has_status=False),
    Kind("networking.k8s.io", ("v1",), "ingresses", "Ingress", short=("ing",)),
    Kind("autoscaling", ("v2", "v1"), "horizontalpodautoscalers", "HorizontalPodAutoscaler",
         short=("hpa",)),
    Kind("scheduling.k8s.io", ("v1",), "priorityclasses", "PriorityClass", namespaced=False,
         short=("pc",), has_status=False),
    Kind("rbac.authorization.k8s.io", ("v1",), "roles", "Role", has_status=False),
    Kind("rbac.authorization.k8s.io", ("v1",), "rolebindings", "RoleBinding", has_status=False),
    Kind("rbac.authorization.k8s.io", ("v1",), "clusterroles", "ClusterRole", namespaced=False,
         has_status=False),
    Kind("rbac.authorization.k8s.io", ("v1",), "clusterrolebindings", "ClusterRoleBinding",
         namespaced=False, has_status=False),
    Kind("apiextensions.k8s.io", ("v1",), "customresourcedefinitions", "CustomResourceDefinition",
         namespaced=False, short=("crd", "crds")),
)  # fmt: skip

LIST_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "hostAliases": ("ip",),
    "secrets": ("name",),
    "resourceClaims": ("name",),
}
"""Keys of the lists of built-in objects that are maps. Other lists are replaced whole."""
SETS = {"finalizers"}


def list_keys(schema: Object | None, name: str, owner: str) -> tuple[str, ...] | None:
    """Return the keys of a list that is a map, `()` for a set, and None for an atomic list.

    `schema` is that of the list, None in built-in objects; `owner` is the field that has it.
    """
    if schema is not None:
        kind = schema.get("x-kubernetes-list-type", "atomic")
        if kind == "map":
            return tuple(schema.get("x-kubernetes-list-map-keys", ()))
        return () if kind == "set" else None
    if name == "ports":
        return ("containerPort", "protocol") if owner == "containers" else ("port", "protocol")
    return () if name in SETS else LIST_KEYS.get(name)


def kind_of_definition(definition: Object) -> Kind:
    """Return the kind that a CustomResourceDefinition defines."""
    spec = definition["spec"]
    names = spec["names"]
    versions = sorted(
        (version for version in spec["versions"] if version.get("served")),
        key=lambda version: not version.get("storage"),
    )
    scale = next(
        (paths for v in versions if (paths := v.get("subresources", {}).get("scale"))), None
    )
    return Kind(
        spec["group"],
        tuple(version["name"] for version in versions),
        names["plural"],
        names["kind"],
        namespaced=spec.get("scope") == "Namespaced",
        short=tuple(names.get("shortNames", ())),
        singular=names.get("singular", ""),
        categories=tuple(names.get("categories", ())),
        has_status=any("status" in version.get("subresources", {}) for version in versions),
        scale=scale
        and (
            scale["specReplicasPath"],
            scale["statusReplicasPath"],
            scale.get("labelSelectorPath", ""),
        ),
        columns={
            version["name"]: [
                Column(column["name"], column["jsonPath"], column.get("type", "string"))
                for column in version.get("additionalPrinterColumns", ())
            ]
            for version in versions
        },
        schemas={
            version["name"]: version.get("schema", {}).get("openAPIV3Schema", {})
            for version in versions
        },
    )
