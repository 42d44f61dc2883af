"""The types of what the operator reads of pod templates and of services of v1alpha1, for which the
API server has no schema. Other fields may have any type here."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

Strings = dict[str, str | None] | None
Amounts = dict[str, int | float | str | None] | None


class NamedObject(Struct, rename="camel"):
    """A Secret, ConfigMap, claim or account that a pod needs."""

    name: str | None = None
    secret_name: str | None = None
    claim_name: str | None = None
    optional: bool | None = None


class VariableSource(Struct, rename="camel"):
    """The object that has the value of a variable."""

    secret_key_ref: NamedObject | None = None
    config_map_key_ref: NamedObject | None = None


class Variable(Struct, rename="camel"):
    """A variable of the environment."""

    name: str
    value: str | None = None
    value_from: VariableSource | None = None


class VariablesSource(Struct, rename="camel"):
    """An object with several variables."""

    secret_ref: NamedObject | None = None
    config_map_ref: NamedObject | None = None


class Resources(Struct):
    """The resources of a container."""

    limits: Amounts = None
    requests: Amounts = None
    claims: list[dict[str, Any]] | None = None


class ContainerPort(Struct, rename="camel"):
    """A port of a container."""

    container_port: int
    name: str | None = None


class VolumeMount(Struct, rename="camel"):
    """A volume within a container."""

    name: str
    mount_path: str


class PodContainer(Struct, rename="camel"):
    """A container of a pod."""

    name: str | None = None
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    working_dir: str | None = None
    env: list[Variable] | None = None
    env_from: list[VariablesSource] | None = None
    resources: Resources | None = None
    ports: list[ContainerPort] | None = None
    volume_mounts: list[VolumeMount] | None = None
    startup_probe: dict[str, Any] | None = None
    liveness_probe: dict[str, Any] | None = None
    readiness_probe: dict[str, Any] | None = None
    lifecycle: dict[str, Any] | None = None
    security_context: dict[str, Any] | None = None


class Volume(Struct, rename="camel"):
    """A volume of a pod."""

    name: str
    secret: NamedObject | None = None
    config_map: NamedObject | None = None
    persistent_volume_claim: NamedObject | None = None


class Pod(Struct, rename="camel"):
    """The spec of a pod."""

    containers: list[PodContainer] | None = None
    init_containers: list[PodContainer] | None = None
    volumes: list[Volume] | None = None
    node_selector: Strings = None
    affinity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None
    service_account_name: str | None = None
    priority_class_name: str | None = None
    termination_grace_period_seconds: int | None = None
    scheduling_gates: list[NamedObject] | None = None
    image_pull_secrets: list[NamedObject] | None = None


class TemplateMetadata(Struct):
    """Labels and annotations of pods."""

    labels: Strings = None
    annotations: Strings = None


class PodTemplate(Struct):
    """A PodTemplateSpec."""

    metadata: TemplateMetadata | UnsetType = UNSET
    spec: Pod | UnsetType = UNSET


class ServicePod(Pod, rename="camel"):
    """A pod of v1alpha1, whose own container has a field."""

    main_container: PodContainer | None = None


class ServiceAmounts(Struct, rename="camel"):
    """Resources of v1alpha1."""

    gpu_type: str | None = None
    custom: Amounts = None


class ServiceResources(Struct):
    """The resources of a service."""

    limits: ServiceAmounts | None = None
    requests: ServiceAmounts | None = None


class Mount(Struct, rename="camel"):
    """A claim that a service mounts."""

    name: str
    mount_point: str | None = None
    use_as_compilation_cache: bool | None = None


class Switch(Struct):
    """A feature of a service that can be off."""

    enabled: bool | None = None
    disabled: bool | None = None


class Service(Struct, rename="camel"):
    """A service of v1alpha1."""

    component_type: str | None = None
    sub_component_type: str | None = None
    annotations: Strings = None
    labels: Strings = None
    envs: list[Variable] | None = None
    env_from_secret: str | None = None
    resources: ServiceResources | None = None
    volume_mounts: list[Mount] | None = None
    shared_memory: Switch | None = None
    scaling_adapter: Switch | None = None
    extra_pod_metadata: TemplateMetadata | None = None
    extra_pod_spec: ServicePod | None = None
    liveness_probe: dict[str, Any] | None = None
    readiness_probe: dict[str, Any] | None = None
