"""Announcements of instances, and which of them cannot answer: roles, labels, features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, Unsupported
from dynamo.core.labels import LABELS_KEY, parse_labels, satisfies_constraints
from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.core.values import BOTH_ROLES, OWN_FEATURES
from dynamo.runtime.calls.instances import Instance


def instance_roles(instance: Instance) -> tuple[str, ...]:
    """Return the roles that the instance announced; both without an announcement."""
    engine = instance.capabilities.get("engine")
    roles = engine.get("roles") if isinstance(engine, dict) else None
    return tuple(roles) if roles else BOTH_ROLES


def decodes(instance: Instance) -> bool:
    """Whether the instance computes answers."""
    return "decode" in instance_roles(instance)


def only_prefills(instance: Instance) -> bool:
    """Whether the instance computes prompts for others only."""
    return instance_roles(instance) == ("prefill",)


def only_decodes(instance: Instance) -> bool:
    """Whether the instance computes answers, and prompts only without a prefill worker."""
    return instance_roles(instance) == ("decode",)


def exceeds_thresholds(
    settings: DisaggregationSettings, uncached_tokens: int, pending: int
) -> bool:
    """Whether a prompt is long enough for a prefill worker, and few enough prompts are pending."""
    return (
        uncached_tokens > settings.prefill_length_threshold
        and pending < settings.queue_size_threshold
    )


Constraints = Mapping[str, str]
"""Label -> the value that a worker must have."""

NO_CONSTRAINTS: Constraints = MappingProxyType({})

MAX_REMEMBERED = 64
"""Different labels and features whose excluded workers are remembered."""


class NoAvailableWorker(NoWorkers):
    """No worker satisfies the constraints."""


def read_constraints(context: Context) -> Constraints:
    """Return the labels that the request requires of its worker."""
    text = context.metadata.get(LABELS_KEY)
    return parse_labels(text) if text else NO_CONSTRAINTS


def find_excluded_workers(instances: Mapping[str, Instance], labels: str) -> frozenset[str]:
    """Return the ids of instances that lack one of the labels, written as `zone=a,gpu=h100`."""
    constraints = parse_labels(labels) if labels else NO_CONSTRAINTS
    if not constraints:
        return frozenset()
    return frozenset(
        name
        for name, instance in instances.items()
        if not satisfies_constraints(instance.capabilities.get(LABELS_KEY) or {}, constraints)
    )


def excluded_workers(instances: Mapping[str, Instance], context: Context) -> frozenset[str]:
    """Return the ids of instances that lack a required label. Raises `NoAvailableWorker` if every
    instance does."""
    labels = context.metadata.get(LABELS_KEY, "")
    excluded = find_excluded_workers(instances, labels)
    if instances and len(excluded) == len(instances):
        raise NoAvailableWorker(
            f"no worker is labelled {labels!r}",
            hint="start a worker with --worker-labels, or send no x-dynamo-labels",
        )
    return excluded


PARAMETERS: dict[str, str] = {
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "logit_bias": "logit_bias",
    "structured": "response_format",
    "thinking_budget": "thinking_token_budget",
    "whitespace": "structured_outputs.whitespace_pattern",
    "form_after_reasoning": "response_format",
    "calls": "tool_choice",
    "resumed_form": "response_format",
    "adapters": "model",
    "extra": "extra",
    "text": "messages",
}
"""The field of a request's body that needs a feature."""


class FeatureFilter:
    """Finds the workers that cannot answer a request. Results are remembered while `instances` is
    the same object, since the search looks at every instance."""

    def __init__(self) -> None:
        self._instances: Mapping[str, Instance] = {}
        self._unable: dict[object, frozenset[str]] = {}

    def workers_without_labels(
        self, instances: Mapping[str, Instance], context: Context
    ) -> frozenset[str]:
        """Return the result of `excluded_workers`. Raises `NoAvailableWorker` like it."""
        labels = context.metadata.get(LABELS_KEY, "")
        return self._remember(instances, labels, lambda: excluded_workers(instances, context))

    def workers_without(
        self, instances: Mapping[str, Instance], required: Sequence[str]
    ) -> frozenset[str]:
        """Return the ids of instances whose engine lacks a feature, or an adapter whose id is among
        the features. Raises `Unsupported` if all do."""
        key = tuple(required)

        def find() -> frozenset[str]:
            return frozenset(
                name
                for name, instance in instances.items()
                if not set(key).issubset(instance_features(instance))
            )

        unable = self._remember(instances, key, find)
        if instances and len(unable) == len(instances):
            raise _unsupported(instances.values(), key)
        return unable

    def _remember(
        self, instances: Mapping[str, Instance], key: object, find: Callable[[], frozenset[str]]
    ) -> frozenset[str]:
        if instances is not self._instances or len(self._unable) >= MAX_REMEMBERED:
            self._instances = instances
            self._unable.clear()
        unable = self._unable.get(key)
        if unable is None:
            unable = self._unable[key] = find()
        return unable


def instance_features(instance: Instance) -> Sequence[str]:
    """Return the features that the instance's engine announces, and the ids of its adapters."""
    capability = instance.capabilities.get("engine")
    if not isinstance(capability, dict) or (features := capability.get("features")) is None:
        return OWN_FEATURES
    return [*features, *instance_adapters(instance)]


def instance_adapters(instance: Instance) -> Mapping[str, str]:
    """Return the path of each LoRA adapter that the instance announces, by its id."""
    capability = instance.capabilities.get("engine")
    adapters = capability.get("adapters") if isinstance(capability, dict) else None
    return adapters if isinstance(adapters, dict) else {}


def _unsupported(instances: Iterable[Instance], required: Sequence[str]) -> Unsupported:
    """Return the error for a request that no instance can answer. Its message names the features
    that no engine has, or all if only their combination is missing."""
    known = {feature for instance in instances for feature in instance_features(instance)}
    missing = [feature for feature in required if feature not in known] or required
    return Unsupported(
        f"no worker of this model supports: {', '.join(missing)}",
        hint="leave it out, or start a worker whose engine supports it",
        field=PARAMETERS.get(missing[0], "model"),
    )
