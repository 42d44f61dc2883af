"""The decision whether a prefill worker computes a prompt, by two thresholds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.scheduling.router.features import exceeds_thresholds

log = logging.getLogger(__name__)


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
        self._config = config or DisaggregationSettings()
        self._hit_length = hit_length or (lambda request: getattr(request, "prefix_hit_length", 0))

    def should_disaggregate(self, request: Any, queue_status: QueueStatus) -> bool:
        """Decide and log the decision with its values. `request` has `input_ids`."""
        hit_length = self._hit_length(request)
        effective = len(request.input_ids) - hit_length
        remote = exceeds_thresholds(self._config, effective, queue_status.pending_requests)
        fields = {
            "disaggregate": remote,
            "effective_prefill_length": effective,
            "queue_pending": queue_status.pending_requests,
            "prefix_hit_length": hit_length,
        }
        log.info("disaggregation decision", extra={"fields": fields})
        return remote
