"""The mock engine under virtual time. A prompt is a list of block hashes, an answer is a length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.communication.transfer import MemoryRegion
from dynamo.core.clock import Clock
from dynamo.core.timing.model import StepTiming
from dynamo.core.values import EngineInfo
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.eviction import make_eviction_policy
from dynamo.inference.fast_forward import FastForward, WaitUntilQuiescent
from dynamo.inference.mock.runner import MockRunner
from dynamo.inference.sequence import ResolveRequest, SequenceContent
from dynamo.inference.tiers.kv_tiers import OpenTiers


class HashContent(SequenceContent):
    """Content known only by block hashes. Blocks beyond the known hashes belong to the answer or to
    a part that no other prompt shares. `new_hash` returns a unique hash for each of them."""

    __slots__ = ("_new_hash",)

    def __init__(self, hashes: list[int], new_hash: Callable[[], int]) -> None:
        self.root = 0
        self.hashes = hashes
        self._new_hash = new_hash

    def ensure_hashes(self, blocks: int) -> None:
        while len(self.hashes) < blocks:
            self.hashes.append(self._new_hash())

    def append_token(self, token: int) -> None:
        """Ignore the token: only lengths matter."""

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Ignore the tokens: only lengths matter."""


def make_simulated_engine(
    info: EngineInfo,
    timing: StepTiming,
    clock: Clock,
    *,
    wait_until_quiescent: WaitUntilQuiescent,
    eviction: str,
    resolve_request: ResolveRequest | None = None,
    vocabulary: Sequence[int] = (),
    fast_forwarding: dict[FastForward, None] | None = None,
    prefix_caching: bool = True,
    region: MemoryRegion | None = None,
    open_tiers: OpenTiers | None = None,
) -> tuple[BatchedEngine, FastForward]:
    """Return a mock engine for virtual time and its `FastForward`. `resolve_request` supplies
    contents that are not the request's own tokens. Without it, requests are taken as they are and
    answers consist of ids of `vocabulary`. `region`: the blocks' memory that peers read. Tiers need
    it, too."""
    runner = MockRunner(info, vocabulary, timing, clock, min_sleep_s=0.0, region=region)
    fast_forward = FastForward(
        runner, clock, wait_until_quiescent, resolve_request, fast_forwarding
    )
    engine = BatchedEngine(
        runner,
        hits_from="scheduled",
        prefix_caching=prefix_caching,
        eviction=make_eviction_policy(eviction),
        time=fast_forward,
        open_tiers=open_tiers,
    )
    return engine, fast_forward
