"""`PeerPrefill`: a prefill worker computes a prompt, and its blocks are pulled while it does."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import xxhash

from dynamo.communication.transfer import RegionPeer, SlotRead
from dynamo.communication.transfer.layout import split_block
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import ProtocolError, TransferFailed, WorkerFailed
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.kv_events import split_worker_name
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
RATE_BYTES = 1 << 30
"""Size of the pull by whose predicted time the rate of a peer is known."""
DEADLINE_FACTOR = 4.0
MIN_DEADLINE_S = 5.0


class PromptTime:
    """Learns how long workers take for prompts. `token_s`: seconds from a call to the first token,
    per prompt token."""

    token_s: float = INITIAL_TOKEN_S

    def predict_s(self, tokens: int) -> float:
        """Predict the seconds to the first token of a prompt."""
        return self.token_s * tokens

    def limit_s(self, tokens: int) -> float:
        """Return the seconds after which a worker has failed to compute a prompt."""
        return MIN_DEADLINE_S + DEADLINE_FACTOR * self.predict_s(tokens)

    def on_computed(self, tokens: int, seconds: float) -> None:
        """Learn from a prompt that was computed."""
        self.token_s += LEARNING_RATE * (seconds / max(tokens, 1) - self.token_s)


class PrefillPeer(PromptTime, ABC):
    """A worker that computes prompts for this one, with one or several data-parallel ranks."""

    ranks: int = 1
    bytes_pulled: int = 0
    """Bytes that this worker has pulled from there."""

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


FindPeer = Callable[[str], Awaitable[PrefillPeer | None]]
"""Returns the worker with an instance id, or None if none is known."""


class PeerPrefill(KvSource):
    """Has prompts computed by the worker that `GenerateRequest.prefill` names. `own_name`: the
    name of this worker or rank, for which nothing is pulled. A worker that `only_decodes` ends a
    request whose prefill worker failed, if the rest of the prompt takes several steps: the router
    sends it again.
    """

    def __init__(self, find_peer: FindPeer, clock: Clock, own_name: str = "") -> None:
        self._find_peer = find_peer
        self._clock = clock
        self._own_names = (own_name, split_worker_name(own_name)[0])
        self.only_decodes = False

    async def fill(self, arrival: Arrival) -> None:
        worker = arrival.request.kv_from or arrival.request.prefill
        if worker in self._own_names:
            return
        try:
            await self._fill(arrival, worker)
        except (TransferFailed, WorkerFailed) as error:
            if not self.only_decodes or arrival.context.attempt or arrival.missing_steps <= 1:
                raise
            failure = WorkerFailed(f"prefill worker {worker} failed: {error.message}")
            failure.instance, _ = split_worker_name(worker)
            arrival.fail(failure)

    def _learn_rate(self, region: RegionPeer) -> None:
        """Keep the rate of the last peer, to two digits so that it rarely changes."""
        seconds = region.predict_s(RATE_BYTES) - region.predict_s(0)
        self.bytes_per_s = float(f"{RATE_BYTES / max(seconds, 1e-9):.2g}")

    async def _fill(self, arrival: Arrival, worker: str) -> None:
        instance, named_rank = split_worker_name(worker)
        peer = await self._find_peer(instance)
        if peer is None or (named_rank or 0) >= peer.ranks:
            raise TransferFailed.of("gone", f"prefill worker {worker} is not known here")
        rank = choose_rank(arrival.request, peer.ranks) if named_rank is None else named_rank
        tokens, started_s = arrival.prompt_tokens, self._clock.now()
        try:
            async with asyncio.timeout(None) as deadline:

                def expect(queued_tokens: int) -> None:
                    nonlocal tokens
                    tokens = arrival.prompt_tokens + queued_tokens
                    loop = asyncio.get_running_loop()
                    deadline.reschedule(loop.time() + peer.limit_s(tokens))

                def on_first_token() -> None:
                    deadline.reschedule(None)
                    peer.on_computed(tokens, self._clock.now() - started_s)

                expect(0)
                region = await peer.connect(rank)
                if not region.available:
                    text = f"prefill worker {worker} is left out after failed transfers"
                    raise TransferFailed.of("refused", text)
                block_tokens = peer_block_tokens(region, arrival)
                missing = arrival.prompt_tokens - arrival.first_block * arrival.block_tokens
                size_bytes = -(-missing // block_tokens) * region.descriptor.slot_bytes
                if arrival.request.kv_from and region.predict_s(size_bytes) > arrival.compute_s:
                    return
                pulled = _PulledPrompt(arrival, region, expect, on_first_token)
                call = peer.prefill(
                    rank, arrival.request, arrival.context, pulled.first_block, pulled
                )
                try:
                    await wait_for_first(pulled.pull_all(), call)
                finally:
                    peer.bytes_pulled += pulled.blocks * region.descriptor.slot_bytes
                self._learn_rate(region)
        except TimeoutError:
            elapsed_s = self._clock.now() - started_s
            peer.on_computed(tokens, elapsed_s)
            text = f"prefill worker {worker} did not compute the prompt within {elapsed_s:.1f} s"
            raise TransferFailed.of("timeout", text) from None
        if not pulled.complete:
            raise ProtocolError(f"prefill worker {worker} ended the call too early")


class _PulledPrompt(PrefillSink):
    """Pulls the blocks of one prompt in the order in which they are reported. Blocks are counted
    in the peer's length here, which may differ from that of this engine.

    `expect` is called with the tokens in front of the prompt, `on_computed` at the first token.
    """

    def __init__(
        self,
        arrival: Arrival,
        region: RegionPeer,
        expect: Callable[[int], None],
        on_computed: Callable[[], None],
    ) -> None:
        self._arrival = arrival
        self._region = region
        self._block_tokens = peer_block_tokens(region, arrival)
        self.first_block = arrival.first_block * arrival.block_tokens // self._block_tokens
        self._end_block = -(-arrival.prompt_tokens // self._block_tokens)
        self._reported: deque[tuple[int, int]] = deque()
        self.blocks = 0
        self._needs_blocks = arrival.needs_blocks
        self._first_token_came = False
        self._error: ProtocolError | None = None
        self._progress = asyncio.Event()
        self._expect = expect
        self._on_computed = on_computed

    @property
    def complete(self) -> bool:
        """Whether the first token and every block that is needed are here."""
        missing = self._needs_blocks and self.first_block + self.blocks < self._end_block
        return self._first_token_came and not missing

    def on_queued(self, tokens: int) -> None:
        self._expect(tokens)

    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        known = self.blocks + len(self._reported)
        expected = self.first_block + known
        if first != expected or expected + len(block_ids) > self._end_block:
            self._error = ProtocolError(
                f"a prefill worker reported {len(block_ids)} blocks from block {first} on, "
                f"but {self._end_block - self.first_block} blocks from block {self.first_block} on "
                f"were asked for, of which {known} are known"
            )
            self._progress.set()
            return False
        self._reported.extend(zip(block_ids, generations, strict=True))
        self._progress.set()
        return True

    def on_first_token(self, first: FirstToken) -> bool:
        if self._first_token_came:
            raise ProtocolError("a prefill worker sent two first tokens")
        self._first_token_came = True
        self._on_computed()
        self._needs_blocks = self._arrival.on_first_token(first) and self._needs_blocks
        self._progress.set()
        return True

    async def pull_all(self) -> None:
        """Pull what is reported until the prompt is complete. Raises `TransferFailed`."""
        while not self.complete:
            if self._error is not None:
                raise self._error
            self._progress.clear()
            if self._reported and self._needs_blocks:
                await self._pull_some()
            else:
                await self._progress.wait()

    async def _pull_some(self) -> None:
        arrival, count = self._arrival, min(MAX_BLOCKS_PER_PULL, len(self._reported))
        sources = [self._reported[index] for index in range(count)]
        await self._region.pull(
            plan_reads(sources, self.first_block + self.blocks, self._block_tokens, arrival)
        )
        for _ in sources:
            self._reported.popleft()
        self.blocks += count
        tokens = (self.first_block + self.blocks) * self._block_tokens
        if tokens < arrival.prompt_tokens:
            tokens -= tokens % arrival.block_tokens
        if tokens > arrival.first_block * arrival.block_tokens:
            arrival.on_arrived(min(tokens, arrival.prompt_tokens))


def peer_block_tokens(region: RegionPeer, arrival: Arrival) -> int:
    """Return the length of the peer's blocks. Blocks of an unknown layout are like those here."""
    layout = region.descriptor.kv
    return arrival.block_tokens if layout is None else layout.block_tokens


def plan_reads(
    sources: Sequence[tuple[int, int]], first: int, block_tokens: int, arrival: Arrival
) -> list[SlotRead]:
    """Return the reads of consecutive blocks of a prompt, (slot, generation) each, which begin with
    block `first` and have `block_tokens`. Blocks that `arrival` has already are left out."""
    targets = arrival.block_ids
    reads: list[SlotRead] = []
    for number, source in enumerate(sources, first):
        for index, *tokens in split_block(number, block_tokens, arrival.block_tokens):
            at = index - arrival.first_block
            if 0 <= at < len(targets):
                reads.append(SlotRead(*source, targets[at], *tokens))
    return reads


def choose_rank(request: GenerateRequest, ranks: int) -> int:
    """Return the data-parallel rank that computes the prompt: the same for a common beginning."""
    if ranks <= 1:
        return 0
    prefix = request.token_ids[: RANK_PREFIX_TOKENS * TOKEN_BYTES]
    return xxhash.xxh3_64_intdigest(request.salt.encode() + prefix) % ranks
