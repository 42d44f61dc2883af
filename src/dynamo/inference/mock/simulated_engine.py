"""The mock engine under virtual time: a prompt is block hashes, an answer is a length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.core.clock import Clock
from dynamo.core.values import EngineInfo
from dynamo.inference.engine import (
    BatchedEngine,
    ResolveRequest,
    SimulationHooks,
    WaitUntilQuiescent,
)
from dynamo.inference.eviction import make_eviction_policy
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.mock.runner import MockRunner
from dynamo.inference.mock.timing import StepTiming
from dynamo.inference.sequence import SequenceContent


class HashContent(SequenceContent):
    """Known by its hashes alone; blocks beyond them (of the answer, or of a prompt that nobody
    shares) get identities of their own. `fresh`: makes one."""

    __slots__ = ("_new_hash",)

    def __init__(self, hashes: list[int], new_hash: Callable[[], int]) -> None:
        self.root = 0
        self.hashes = hashes
        self._new_hash = new_hash

    def ensure_hashes(self, blocks: int) -> None:
        while len(self.hashes) < blocks:
            self.hashes.append(self._new_hash())

    def append_token(self, token: int) -> None:
        """What it was does not matter."""

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """What they were does not matter."""


def make_simulated_engine(
    info: EngineInfo,
    timing: StepTiming,
    clock: Clock,
    *,
    wait_until_quiescent: WaitUntilQuiescent,
    eviction: str,
    resolve_request: ResolveRequest | None = None,
    vocabulary: Sequence[int] = (),
    fast_forwarding: set[FastForward] | None = None,
    prefix_caching: bool = True,
) -> tuple[BatchedEngine, FastForward]:
    """An engine that computes requests which are `known` otherwise than by their tokens; or, where
    they are not, one that speaks in `words` (ids) and takes requests as they are."""
    runner = MockRunner(info, vocabulary, timing, clock, min_sleep_s=0.0)
    leaper = FastForward(runner, clock, fast_forwarding)
    engine = BatchedEngine(
        runner,
        hits_from="scheduled",
        prefix_caching=prefix_caching,
        eviction=make_eviction_policy(eviction),
        simulation=SimulationHooks(resolve_request, wait_until_quiescent, leaper),
    )
    return engine, leaper
