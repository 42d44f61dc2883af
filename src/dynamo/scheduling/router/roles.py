"""Roles of workers, and the decision whether a prefill worker computes a prompt."""

from __future__ import annotations

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.core.values import BOTH_ROLES
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
