"""The thread of a runner of our own decoder: it opens the weights and computes the steps."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import EngineInfo
from dynamo.inference.model_runner import ModelRunner, StepPlan, StepResult
from dynamo.inference.native.engine_sizing import available_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo.models.checkpoint.weights import ModelWeights

T = TypeVar("T")


class WeightsRunner(ModelRunner):
    """Runs one model on a thread of this `name`, which also calls `open_weights`. `memory_bytes` 0:
    all that is available. `_load_model` sets `_backend`, which computes."""

    _backend: Any

    def __init__(
        self,
        name: str,
        open_weights: Callable[[], ModelWeights],
        settings: EngineSettings,
        context_tokens: int,
        memory_bytes: int,
        cache: CacheSettings,
    ) -> None:
        self._open_weights = open_weights
        self._settings = settings
        self._cache = cache
        self._context_tokens = context_tokens
        self._memory_bytes = memory_bytes or available_memory_bytes()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def start(self) -> EngineInfo:
        return await self._run(self._load_model)

    async def step(self, plan: StepPlan) -> StepResult:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._compute_step, plan)

    async def stop(self) -> None:
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        if hasattr(self, "_backend"):
            self._backend.stop()
        if self.region is not None:
            self.region.close()

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the runner's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, work, *arguments)

    @abstractmethod
    def _load_model(self) -> EngineInfo:
        """Load the weights and allocate KV memory; see `ModelRunner.start`."""

    @abstractmethod
    def _compute_step(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
