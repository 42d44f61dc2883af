"""The classes from which users derive engines for NVIDIA Dynamo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from dynamo.common.backend.publisher import KvEventSource
from dynamo.runtime import Context

GenerateRequest = dict[str, Any]
"""A request with `token_ids`, `sampling_options`, `stop_conditions` and `output_options`."""
GenerateChunk = dict[str, Any]
"""A part of an answer: `token_ids` and `index`, and `finish_reason` in the last one."""


@dataclass
class LlmRegistration:
    """Limits of an engine for tokens. None: unknown."""

    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int | None = None
    data_parallel_start_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    enable_eagle: bool = False
    max_gpu_lora_count: int | None = None


@dataclass
class EngineConfig:
    """Describes an engine that has started."""

    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: LlmRegistration | None = None
    model_aliases: list[str] = field(default_factory=list)


class BaseEngine(ABC):
    """An engine of a user. The worker calls `from_args`, `start`, `generate` for each request, and
    `cleanup` at its end, also after a failed start."""

    @classmethod
    @abstractmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[BaseEngine, Any]:
        """Parse arguments (None: those of the process). Returns the engine and its
        `WorkerConfig`."""

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Get ready for `generate`. `worker_id` is unique in the cluster."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Release all resources. May be called twice."""

    async def abort(self, context: Context) -> None:  # noqa: B027 - may be left out
        """Release what a request holds whose caller has left."""

    async def is_quiescent(self) -> bool | None:
        """Whether no KV is on its way. Not called: workers drain before."""
        return None

    async def register_prometheus(self, metrics: Any) -> None:  # noqa: B027 - may be left out
        """Add metrics. Not called: `endpoint.metrics` in `on_endpoint_ready` has them."""

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the ranks that publish snapshots."""
        return []

    def attach_snapshot_publisher(self, publisher: Any) -> None:  # noqa: B027 - may be left out
        """Take the publisher of snapshots, if there are ranks that publish some."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a request for probes. Not called: an engine that counts requests stays exact."""
        return None

    def supported_controls(self) -> set[str]:
        """Return the names of controls. None of them can be called here."""
        return set()

    def supported_updates(self) -> set[str]:
        """Return the names of updates. None of them can be called here."""
        return set()

    async def on_endpoint_ready(self, endpoint: Any) -> None:  # noqa: B027 - may be left out
        """Take the endpoint, before it serves."""


class LLMEngine(BaseEngine):
    """An engine that takes and yields token ids."""

    @abstractmethod
    def generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the parts of an answer. Called for many requests at once."""

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return where the KV events of each rank come from."""
        return []

    async def logits_processor_spec(self) -> Any:
        """Return processors of logits. Not called."""
        return None


class RawEngine(BaseEngine):
    """An engine for media, which no worker serves here."""


class DiffusionEngine(RawEngine):
    """An engine for pictures, which no worker serves here."""
