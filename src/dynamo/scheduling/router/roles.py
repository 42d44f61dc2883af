"""Roles of workers, and the decision whether a prefill worker computes a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.core.values import BOTH_ROLES
from dynamo.runtime.calls.instances import Instance

log = logging.getLogger(__name__)


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


class QueueStatus(msgspec.Struct, frozen=True):
    """The state of the prefill workers: prompts without a first token."""

    pending_requests: int = 0


class DisaggregationRouter:
    """Decide by two thresholds whether a prefill worker computes a prompt.

    The prompt must have more uncached tokens than `prefill_length_threshold`, and fewer than
    `queue_size_threshold` prompts may be pending. `hit_length(request)` returns the prompt tokens
    that the decode worker has cached."""

    def __init__(
        self,
        config: DisaggregationSettings | None = None,
        hit_length: Callable[[Any], int] | None = None,
    ) -> None:
        self.update_settings(config or DisaggregationSettings())
        self._hit_length = hit_length or (lambda request: getattr(request, "prefix_hit_length", 0))

    def update_settings(self, config: DisaggregationSettings) -> None:
        """Apply reloaded settings."""
        self.prefill_length_threshold = config.prefill_length_threshold
        self.queue_size_threshold = config.queue_size_threshold

    def should_disaggregate(self, request: Any, queue_status: QueueStatus) -> bool:
        """Decide and log the decision with its values. `request` has `input_ids`."""
        hit_length = self._hit_length(request)
        effective = len(request.input_ids) - hit_length
        remote = self.exceeds_thresholds(effective, queue_status.pending_requests)
        fields = {
            "disaggregate": remote,
            "effective_prefill_length": effective,
            "queue_pending": queue_status.pending_requests,
            "prefix_hit_length": hit_length,
        }
        log.info("disaggregation decision", extra={"fields": fields})
        return remote

    def exceeds_thresholds(self, uncached_tokens: int, pending: int) -> bool:
        """Whether a prompt is long enough and few enough prompts are pending."""
        return (
            uncached_tokens > self.prefill_length_threshold and pending < self.queue_size_threshold
        )
