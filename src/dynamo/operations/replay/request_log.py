"""The log of a replay: requests in flight, and measurements of the finished ones."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.inference.fast_forward import FastForward
from dynamo.inference.mock.simulated_engine import HashContent
from dynamo.inference.sequence import SequenceContent
from dynamo.operations.bench.workload import LatencyObjectives
from dynamo.operations.latency_summary import LatencyHistogram
from dynamo.operations.replay.trace import TraceBlockConverter, TraceRequest
from dynamo.scheduling.workers.prompt import Prompt

FIRST_UNIQUE_BLOCK = 1 << 62
SPREAD, MAX_HASH = 0x9E3779B97F4A7C15, (1 << 64) - 1
NO_OBJECTIVES = LatencyObjectives()


class PlacementRecord(msgspec.Struct, frozen=True):
    """The engine that a request was sent to, and the virtual time. `request` is its line in the
    trace. `worker` counts engines: the ranks of the first worker come first."""

    request: int
    worker: int
    placed_ms: float


class FinishedRequest(Protocol):
    """The measurements of a request."""

    trace_request: TraceRequest
    arrived_s: float
    first_token_s: float
    cached_tokens: int
    output_tokens: int


class ReplayRequest(Reply):
    """A request in flight. `fast_forward` belongs to the engine that answers."""

    def __init__(self, log: ReplayLog, turn: TraceRequest, hashes: list[int], now: float) -> None:
        self._log = log
        self.trace_request = turn
        self.block_hashes = hashes
        self.arrived_s = now
        self.first_token_s = 0.0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.fast_forward: FastForward | None = None
        self._last_token_s = 0.0

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del logprobs
        log = self._log
        skipping = self.fast_forward
        if skipping is not None and len(ends := skipping.delivered_step_ends):
            log.inter_token.add(ends[0] - self._last_token_s)
            log.on_fast_forward(ends)
            self._last_token_s = float(ends[-1])
        else:
            now = log.clock.now()
            if self.output_tokens:
                log.inter_token.add(now - self._last_token_s)
            else:
                self.first_token_s = now
            self._last_token_s = now
        self.output_tokens += len(ids)
        log.last_progress_s = self._last_token_s
        return True

    def finish(self, end: Finish) -> None:
        del end
        self._log.on_finished(self, self._last_token_s)


class ReplayLog:
    """All requests of a replay: those in flight by id, and totals and latencies of the others."""

    def __init__(
        self,
        clock: Clock,
        blocks: TraceBlockConverter,
        block_tokens: int,
        objectives: LatencyObjectives = NO_OBJECTIVES,
        *,
        spreads: bool = False,
    ) -> None:
        """`spreads`: hashes are spread over 64 bits like those of real blocks, by which the tables
        of memory tiers find them."""
        self.clock = clock
        self._spread = SPREAD if spreads else 1
        self.inter_token = LatencyHistogram()
        self.in_flight: dict[str, ReplayRequest] = {}
        self._requests, self._workers = array("q"), array("i")
        self._placed_ms = array("d")
        self._prefills = Counter[int]()
        self.ttft_s, self.tpot_s, self.e2e_s = array("d"), array("d"), array("d")
        self.arrived_s = array("d")
        self.rows, self.tokens = array("q"), array("q")
        """The line of each completed request, and its output tokens."""
        self.last_progress_s = 0.0
        """Virtual time of the last arrival or token."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.requests = self.arrived_tokens = 0
        self.completed = 0
        self.good = 0
        """Completed requests that met the objectives."""
        self.broken_s, self.failed_s = array("d"), array("d")
        """The arrivals of the other requests that have ended, and of those with an error."""
        self.errors: dict[str, int] = {}
        self._max_ttft_s = objectives.ttft_ms / 1e3 or math.inf
        self._max_tpot_s = objectives.itl_ms / 1e3 or math.inf
        self._block_converter = blocks
        self._block_tokens = block_tokens
        self._last_unique_block = FIRST_UNIQUE_BLOCK
        self._token_times: Any = ()
        self._requests_sharing_token_times = 0

    def new_unique_block(self) -> int:
        """Return a block hash that no other prompt has."""
        self._last_unique_block += 1
        return self._last_unique_block * self._spread & MAX_HASH

    def on_arrival(self, turn: TraceRequest) -> ReplayRequest:
        """Record the arrival of a request and return its reply."""
        hashes = self._block_converter.block_hashes(turn)
        if self._spread > 1:
            hashes = [block * self._spread & MAX_HASH for block in hashes]
        missing = turn.prompt_tokens // self._block_tokens - len(hashes)
        hashes += [self.new_unique_block() for _ in range(missing)]
        request = ReplayRequest(self, turn, hashes, self.clock.now())
        self.in_flight[str(turn.row)] = request
        self.requests += 1
        self.arrived_tokens += turn.prompt_tokens
        self.last_progress_s = request.arrived_s
        return request

    def on_ended(self, turn: TraceRequest, error: str = "") -> None:
        """Record the end of a request, with the code of its `error` if there was one."""
        request = self.in_flight.pop(str(turn.row))
        if error:
            self.on_failed(error, request.arrived_s)

    def on_failed(self, error: str, arrived_s: float) -> None:
        """Record the error of a request that arrived at a time: a broken promise."""
        self.errors[error] = self.errors.get(error, 0) + 1
        self.failed_s.append(arrived_s)
        self.broken_s.append(arrived_s)

    def prompt_of(self, request: GenerateRequest) -> Prompt:
        """Return the prompt for the router (a `ReadPrompt`)."""
        replayed = self.in_flight[request.request_id]
        tokens = replayed.trace_request.prompt_tokens + request.resumed
        return Prompt(tokens, replayed.block_hashes)

    def on_placed(
        self, request: GenerateRequest, worker: int, fast_forward: FastForward
    ) -> tuple[SequenceContent, int, int]:
        """Record that a request was sent to the engine of that number. Returns the content, prompt
        tokens and output tokens for that engine."""
        replayed = self.in_flight[request.request_id]
        replayed.fast_forward = fast_forward
        self.record_placement(replayed.trace_request.row, worker)
        return self._engine_inputs(replayed, request.resumed)

    def record_placement(self, row: int, worker: int) -> None:
        """Record that the request of this line was sent to the engine of that number now."""
        self._requests.append(row)
        self._workers.append(worker)
        self._placed_ms.append(self.clock.now() * 1e3)

    def on_prefill_placed(
        self, request: GenerateRequest, worker: int
    ) -> tuple[SequenceContent, int, int]:
        """Record that a prompt was sent to the engine of that number for another worker. Returns
        the same as `on_placed`."""
        self.record_prefill(worker)
        return self._engine_inputs(self.in_flight[request.request_id], request.resumed)

    def record_prefill(self, worker: int) -> None:
        """Count a prompt that was sent to the engine of that number for another worker."""
        self._prefills[worker] += 1

    def _engine_inputs(
        self, replayed: ReplayRequest, resumed: int
    ) -> tuple[SequenceContent, int, int]:
        turn = replayed.trace_request
        content = HashContent(replayed.block_hashes.copy(), self.new_unique_block)
        return content, turn.prompt_tokens + resumed, turn.output_tokens - resumed

    @property
    def placements(self) -> Iterator[PlacementRecord]:
        """Placements in the order in which they happened."""
        return map(PlacementRecord, self._requests, self._workers, self._placed_ms)

    def count_requests(self) -> Counter[int]:
        """Return how many prompts and requests the engine of each number got."""
        return Counter(self._workers) + self._prefills

    def on_fast_forward(self, ends: Any) -> None:
        """Record a token at each time of `ends` for one request. Requests of one batch pass the
        same object one after the other and are counted together."""
        if ends is self._token_times:
            self._requests_sharing_token_times += 1
            return
        self.flush_token_times()
        self._token_times, self._requests_sharing_token_times = ends, 1

    def flush_token_times(self) -> None:
        """Count the token times that are still pending. Call at the end."""
        if len(self._token_times):
            self.inter_token.add_gaps(self._token_times, self._requests_sharing_token_times)
        self._token_times, self._requests_sharing_token_times = (), 0

    def on_finished(self, request: FinishedRequest, now: float) -> None:
        """Add the measurements of a completed request whose last token came at `now`."""
        arrived_s, first_s, tokens = request.arrived_s, request.first_token_s, request.output_tokens
        turn = request.trace_request
        self.completed += 1
        self.arrived_s.append(arrived_s)
        self.rows.append(turn.row)
        self.tokens.append(tokens)
        ttft_s, tpot_s = first_s - arrived_s, 0.0
        self.ttft_s.append(ttft_s)
        self.e2e_s.append(now - arrived_s)
        if tokens > 1:
            tpot_s = (now - first_s) / (tokens - 1)
            self.tpot_s.append(tpot_s)
        if ttft_s <= self._max_ttft_s and tpot_s <= self._max_tpot_s:
            self.good += 1
        else:
            self.broken_s.append(arrived_s)
        self.prompt_tokens += turn.prompt_tokens
        self.cached_tokens += request.cached_tokens
        self.output_tokens += tokens


ReplayProgressCallback = Callable[[ReplayLog], None]
