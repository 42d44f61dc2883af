"""The ranks of a foreign engine: which answers are in them, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.core.reply import EngineRank, KvEventListener
from dynamo.core.values import GenerateRequest, KvEvent, Load
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.engines.drift_check import Prediction
from dynamo.inference.engines.kv_view import EngineKvView


class ForeignRank(EngineRank):
    """A rank whose load is known by the answers in it. `total_blocks` have the card's size.
    `answers` has what its cache was predicted to hold of each prompt, if it is."""

    def __init__(self) -> None:
        self.answers: dict[ForeignAnswer, Prediction | None] = {}
        self.total_blocks = 0
        self.steps = self.gaps = self.slow_gaps = 0

    def enter(self, answer: ForeignAnswer, request: GenerateRequest) -> None:
        """Count a request that the engine gets now."""
        del request
        self.answers[answer] = None

    def leave(self, answer: ForeignAnswer, request: GenerateRequest) -> None:
        """Forget an answer that has ended."""
        del request, self.answers[answer]

    def on_gap(self, *, slow: bool) -> None:
        """Count a time between two outputs of a request whose router steers these times."""
        self.gaps += 1
        self.slow_gaps += slow

    def count_running(self) -> int:
        """Return how many requests have a token."""
        return sum(answer.tokens > 0 for answer in self.answers)

    def count_active_blocks(self) -> int:
        """Return how many blocks requests use, as far as known."""
        return 0

    @property
    def cached_blocks(self) -> int:
        """The number of cached blocks of the card's size, as far as known."""
        return 0

    def report_load(self) -> Load:
        running = self.count_running()
        return Load(
            running=running,
            waiting=len(self.answers) - running,
            prefill_tokens=sum(answer.prefill_tokens for answer in self.answers),
            active_blocks=self.count_active_blocks(),
            total_blocks=self.total_blocks,
            steps=self.steps,
            gaps=self.gaps,
            slow_gaps=self.slow_gaps,
            cached_blocks=self.cached_blocks,
        )


class ViewedRank(ForeignRank):
    """A data-parallel rank whose cached blocks are those of a view."""

    def __init__(self, view: EngineKvView) -> None:
        super().__init__()
        self.view = view

    def enter(self, answer: ForeignAnswer, request: GenerateRequest) -> None:
        self.answers[answer] = self.view.drift.on_submitted(request.token_ids, request.salt)

    def leave(self, answer: ForeignAnswer, request: GenerateRequest) -> None:
        prediction = self.answers.pop(answer)
        computed = request.kv or request.prompt_logprobs is not None  # whatever is cached
        if prediction is not None:
            self.view.drift.on_ended(prediction, None if computed else answer.cached_tokens)

    def count_active_blocks(self) -> int:
        size = self.view.blocks.block_tokens
        lengths = (answer.prompt_tokens + answer.tokens for answer in self.answers)
        return min(sum(-(-length // size) for length in lengths), self.total_blocks)

    @property
    def cached_blocks(self) -> int:
        blocks = self.view.blocks
        return len(blocks) * blocks.engine_block_tokens // blocks.block_tokens

    def on_kv_events(self, listener: KvEventListener) -> None:
        self.view.on_kv_events(listener)

    def snapshot_kv_events(self) -> Sequence[KvEvent]:
        return self.view.snapshot()

    @property
    def kv_problem(self) -> str:
        return self.view.problem

    @property
    def kv_counts(self) -> Mapping[tuple[str, str], int]:
        return self.view.counts
