"""`PeerPrefill`: a prefill worker computes a prompt, and its blocks are pulled while it does."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import xxhash

from dynamo.communication.transfer import RegionPeer, SlotRead
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import ProtocolError, TransferFailed
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.tasks import wait_for_first
from dynamo.core.values import GenerateRequest
from dynamo.inference.kv_source import Arrival, FirstToken, KvSource, PrefillSink

MAX_BLOCKS_PER_PULL = 64
"""More blocks are pulled in parts, so that a failure loses few of them."""
RANK_PREFIX_TOKENS = 256
"""Prompts with these first tokens in common go to the same data-parallel rank."""
INITIAL_TOKEN_S = 0.002
"""Seconds of a prompt token at a worker that has computed none for this one."""
LEARNING_RATE = 0.25
DEADLINE_FACTOR = 4.0
MIN_DEADLINE_S = 5.0


class PrefillPeer(ABC):
    """A worker that computes prompts for this one, with one or several data-parallel ranks."""

    ranks: int = 1
    token_s: float = INITIAL_TOKEN_S
    """Learnt seconds from a call to the first token, per prompt token."""

    @abstractmethod
    async def connect(self, rank: int) -> RegionPeer:
        """Return the memory of a rank, when it is connected. Raises `TransferFailed`."""

    @abstractmethod
    async def prefill(
        self,
        rank: int,
        request: GenerateRequest,
        context: Context,
        have_blocks: int,
        sink: PrefillSink,
    ) -> None:
        """Let a rank compute a prompt; see `BatchedEngine.prefill`. Raises the errors of a call."""

    def predict_s(self, tokens: int) -> float:
        """Predict the seconds to the first token of a prompt."""
        return self.token_s * tokens

    def on_computed(self, tokens: int, seconds: float) -> None:
        """Learn from a prompt that was computed."""
        self.token_s += LEARNING_RATE * (seconds / max(tokens, 1) - self.token_s)


FindPeer = Callable[[str], Awaitable[PrefillPeer | None]]
"""Returns the worker with an instance id, or None if none is known."""


class PeerPrefill(KvSource):
    """Has prompts computed by the worker that `GenerateRequest.prefill` names. `own_id`: the id of
    this worker, for which nothing is pulled."""

    def __init__(self, find_peer: FindPeer, clock: Clock, own_id: str = "") -> None:
        self._find_peer = find_peer
        self._clock = clock
        self._own_id = own_id

    async def fill(self, arrival: Arrival) -> None:
        worker = arrival.request.prefill
        if worker == self._own_id:
            return
        peer = await self._find_peer(worker)
        if peer is None:
            raise TransferFailed.of("gone", f"prefill worker {worker} is not known here")
        rank = choose_rank(arrival.request, peer.ranks)
        pulled = _PulledPrompt(arrival)
        started_s, new_tokens = self._clock.now(), arrival.prompt_tokens
        deadline_s = MIN_DEADLINE_S + DEADLINE_FACTOR * peer.predict_s(new_tokens)
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                region = await peer.connect(rank)
                if not region.available:
                    text = f"prefill worker {worker} is spared after failed transfers"
                    raise TransferFailed.of("refused", text)

                def on_first_token() -> None:
                    deadline.reschedule(None)
                    peer.on_computed(new_tokens, self._clock.now() - started_s)

                pulled.on_computed = on_first_token
                call = peer.prefill(
                    rank, arrival.request, arrival.context, arrival.first_block, pulled
                )
                await wait_for_first(pulled.pull_all(region), call)
        except TimeoutError:
            peer.on_computed(new_tokens, deadline_s)
            text = f"prefill worker {worker} did not compute the prompt within {deadline_s:.1f} s"
            raise TransferFailed.of("timeout", text) from None
        if not pulled.complete:
            raise ProtocolError(f"prefill worker {worker} ended the call too early")


class _PulledPrompt(PrefillSink):
    """Pulls the blocks of one prompt in the order in which they are reported."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._reads: deque[SlotRead] = deque()
        self._pulled_blocks = 0
        self._needs_blocks = arrival.needs_blocks
        self._first_token_came = False
        self._error: ProtocolError | None = None
        self._progress = asyncio.Event()
        self.on_computed: Callable[[], None] = lambda: None

    @property
    def complete(self) -> bool:
        """Whether the first token and every block that is needed are here."""
        missing = self._needs_blocks and self._pulled_blocks < len(self._arrival.block_ids)
        return self._first_token_came and not missing

    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        targets = self._arrival.block_ids
        at = self._pulled_blocks + len(self._reads)
        if first != self._arrival.first_block + at or at + len(block_ids) > len(targets):
            self._error = ProtocolError(
                f"a prefill worker reported {len(block_ids)} blocks from block {first} on, "
                f"but {len(targets)} blocks from block {self._arrival.first_block} on were asked "
                f"for, of which {at} are known"
            )
            self._progress.set()
            return False
        for block, generation in zip(block_ids, generations, strict=True):
            self._reads.append(SlotRead(block, generation, targets[at]))
            at += 1
        self._progress.set()
        return True

    def on_first_token(self, first: FirstToken) -> bool:
        self._first_token_came = True
        self.on_computed()
        self._needs_blocks = self._arrival.on_first_token(first) and self._needs_blocks
        self._progress.set()
        return True

    async def pull_all(self, region: RegionPeer) -> None:
        """Pull what is reported until the prompt is complete. Raises `TransferFailed`."""
        while not self.complete:
            if self._error is not None:
                raise self._error
            self._progress.clear()
            if self._reads and self._needs_blocks:
                await self._pull_some(region)
            else:
                await self._progress.wait()

    async def _pull_some(self, region: RegionPeer) -> None:
        arrival, count = self._arrival, min(MAX_BLOCKS_PER_PULL, len(self._reads))
        reads = [self._reads[index] for index in range(count)]
        await region.pull(reads)
        for _ in reads:
            self._reads.popleft()
        self._pulled_blocks += count
        end = (arrival.first_block + self._pulled_blocks) * arrival.block_tokens
        arrival.on_arrived(min(end, arrival.prompt_tokens))


def choose_rank(request: GenerateRequest, ranks: int) -> int:
    """Return the data-parallel rank that computes the prompt: the same for a common beginning."""
    if ranks <= 1:
        return 0
    prefix = request.token_ids[: RANK_PREFIX_TOKENS * TOKEN_BYTES]
    return xxhash.xxh3_64_intdigest(request.salt.encode() + prefix) % ranks
