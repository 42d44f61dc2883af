"""Selection of workers by what a request needs of their engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynamo.core.errors import Unsupported
from dynamo.core.values import OWN_FEATURES
from dynamo.runtime.calls.instances import Instance

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
        self._unable: dict[tuple[str, ...], frozenset[str]] = {}

    def workers_without(
        self, instances: Mapping[str, Instance], required: Sequence[str]
    ) -> frozenset[str]:
        """Return the ids of instances whose engine lacks a feature, or an adapter whose id is among
        the features. Raises `Unsupported` if all do."""
        if instances is not self._instances:
            self._instances = instances
            self._unable.clear()
        key = tuple(required)
        unable = self._unable.get(key)
        if unable is None:
            unable = self._unable[key] = frozenset(
                name
                for name, instance in instances.items()
                if not set(key).issubset(instance_features(instance))
            )
        if instances and len(unable) == len(instances):
            raise _unsupported(instances.values(), key)
        return unable


def instance_features(instance: Instance) -> Sequence[str]:
    """Return the features that the instance's engine announces, and the ids of its adapters."""
    capability = instance.capabilities.get("engine")
    if not isinstance(capability, dict) or (features := capability.get("features")) is None:
        return OWN_FEATURES
    own = "calls" in features and capability.get("engine") != "vllm"
    implied = ["form_after_reasoning", "resumed_form"] if own else []  # older ones do not say so
    return [*features, *implied, *instance_adapters(instance)]


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
