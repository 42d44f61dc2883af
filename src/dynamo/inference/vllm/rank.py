"""A data-parallel rank of vLLM: its load and the view of its prefix cache."""

from __future__ import annotations

from typing import Any

from dynamo.core.values import GenerateRequest, Load
from dynamo.inference.external import EngineKvView, Prediction, ViewedRank


class VllmRank(ViewedRank):
    """A rank of an AsyncLLM. vLLM reports only while it computes, so that an idle rank is known by
    the requests that it was given."""

    def __init__(self, view: EngineKvView) -> None:
        super().__init__(view)
        self.preemptions = 0
        self.gaps = self.slow_gaps = 0
        self._prompts: dict[int, int] = {}
        self._running = 0
        self._usage = 0.0

    @property
    def requests(self) -> int:
        """The number of requests that the rank was given and has not completed."""
        return len(self._prompts)

    def on_request(self, number: int, request: GenerateRequest, prompt_tokens: int) -> Prediction:
        """Count a request by a number of its own, and predict its cached tokens."""
        self._prompts[number] = prompt_tokens
        return self.view.drift.on_submitted(request.token_ids, request.salt)

    def on_first_token(self, number: int) -> None:
        """Count the prompt of a request as computed."""
        self._prompts[number] = 0

    def on_gap(self, *, slow: bool) -> None:
        """Count a time between two outputs of a request whose router steers these times."""
        self.gaps += 1
        self.slow_gaps += slow

    def on_request_ended(
        self, number: int, prediction: Prediction, cached_tokens: int | None
    ) -> None:
        """Forget a request. `cached_tokens` None: it ended before its first token."""
        del self._prompts[number]
        self.view.drift.on_ended(prediction, cached_tokens)

    def on_statistics(self, scheduler: Any, iteration: Any) -> None:
        """Take over vLLM's statistics of one step; each may be None."""
        self.steps += 1
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._usage = scheduler.kv_cache_usage
        if iteration is not None:
            self.preemptions += getattr(iteration, "num_preempted_reqs", 0)

    def report_load(self) -> Load:
        requests = self.requests
        running = min(self._running, requests)
        return Load(
            running=running,
            waiting=requests - running,
            prefill_tokens=sum(self._prompts.values()),
            active_blocks=round(self._usage * self.total_blocks) if requests else 0,
            total_blocks=self.total_blocks,
            steps=self.steps,
            gaps=self.gaps,
            slow_gaps=self.slow_gaps,
            cached_blocks=self.cached_blocks,
        )
