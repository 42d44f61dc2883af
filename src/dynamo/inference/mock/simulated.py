"""The mock engine under virtual time: a prompt is block hashes, an answer is a length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.core.clock import Clock
from dynamo.core.values import EngineInfo
from dynamo.inference.engine import BatchedEngine, Known, Settled, Simulation
from dynamo.inference.eviction import make_eviction
from dynamo.inference.leap import Leaper
from dynamo.inference.mock.runner import MockRunner
from dynamo.inference.mock.timing import Timing
from dynamo.inference.sequence import Content


class HashContent(Content):
    """Known by its hashes alone; blocks beyond them (of the answer, or of a prompt that nobody
    shares) get identities of their own. `fresh`: makes one."""

    __slots__ = ("_fresh",)

    def __init__(self, hashes: list[int], fresh: Callable[[], int]) -> None:
        self.root = 0
        self.hashes = hashes
        self._fresh = fresh

    def extend(self, blocks: int) -> None:
        while len(self.hashes) < blocks:
            self.hashes.append(self._fresh())

    def append(self, token: int) -> None:
        """What it was does not matter."""

    def extend_by(self, tokens: Sequence[int]) -> None:
        """What they were does not matter."""


def make_simulated(
    info: EngineInfo,
    timing: Timing,
    clock: Clock,
    *,
    settled: Settled,
    eviction: str,
    known: Known | None = None,
    words: Sequence[int] = (),
    leaping: set[Leaper] | None = None,
    prefix_caching: bool = True,
) -> tuple[BatchedEngine, Leaper]:
    """An engine that computes requests which are `known` otherwise than by their tokens; or, where
    they are not, one that speaks in `words` (ids) and takes requests as they are."""
    runner = MockRunner(info, words, timing, clock, shortest_sleep_s=0.0)
    leaper = Leaper(runner, clock, leaping)
    engine = BatchedEngine(
        runner,
        hits_from="scheduled",
        prefix_caching=prefix_caching,
        eviction=make_eviction(eviction),
        simulation=Simulation(known, settled, leaper),
    )
    return engine, leaper
