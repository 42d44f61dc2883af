"""Requests on their way through a replay, and what is kept of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.reply import Extra, Reply
from dynamo.core.values import Finish, GenerateRequest, Started
from dynamo.inference.leap import Leaper
from dynamo.inference.mock.simulated import HashContent
from dynamo.inference.sequence import Content
from dynamo.operations.replay.figures import Gaps
from dynamo.operations.replay.trace import Blocks, Turn
from dynamo.scheduling.router.prompt import Prompt

FIRST_FRESH = 1 << 62


class Placing(msgspec.Struct, frozen=True):
    """Where a request went, and when (virtual time). `worker`: of workers with data-parallel ranks
    the engine, those of the first worker first."""

    request: int
    worker: int
    placed_ms: float


class Flight(Reply):
    """One request under way. `leaper`: of the worker that answers."""

    __slots__ = (
        "_last_s",
        "_log",
        "arrived_s",
        "cached_tokens",
        "first_s",
        "hashes",
        "leaper",
        "tokens_out",
        "turn",
        "worker",
    )

    def __init__(self, log: FlightLog, turn: Turn, hashes: list[int], now: float) -> None:
        self._log = log
        self.turn = turn
        self.hashes = hashes
        self.arrived_s = now
        self.first_s = 0.0
        self.cached_tokens = 0
        self.tokens_out = 0
        self.worker = -1
        self.leaper: Leaper | None = None
        self._last_s = 0.0

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens

    def tokens(self, ids: Sequence[int], extra: Extra | None = None) -> bool:
        del extra
        log = self._log
        ends = self.leaper.ends if self.leaper is not None else ()
        if ends:
            log.gaps.add(ends[0] - self._last_s)
            log.leapt(ends)
            self._last_s = ends[-1]
        else:
            now = log.clock.now()
            if self.tokens_out:
                log.gaps.add(now - self._last_s)
            else:
                self.first_s = now
            self._last_s = now
        self.tokens_out += len(ids)
        log.moved_s = self._last_s
        return True

    def finish(self, end: Finish) -> None:
        del end
        self._log.finished(self, self._last_s)


class FlightLog:
    """All requests of a replay: those under way by id, what came of the others."""

    def __init__(self, clock: Clock, blocks: Blocks, block_tokens: int) -> None:
        self.clock = clock
        self.gaps = Gaps()
        self.under_way: dict[str, Flight] = {}
        self._requests, self._workers = array("q"), array("i")
        self._placed_ms = array("d")
        self.ttft_s, self.tpot_s, self.e2e_s = array("d"), array("d"), array("d")
        self.arrived_s = array("d")
        self.moved_s = 0.0
        """When a request last came, or got a token."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.requests = 0
        self.completed = 0
        self.errors: dict[str, int] = {}
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._fresh = FIRST_FRESH
        self._leap: Sequence[float] = ()
        self._leapers = 0

    def fresh(self) -> int:
        """The name of a block that nobody else has."""
        self._fresh += 1
        return self._fresh

    def depart(self, turn: Turn) -> Flight:
        """A request arrives."""
        hashes = self._blocks.hashes(turn)
        missing = turn.prompt_tokens // self._block_tokens - len(hashes)
        hashes += [self.fresh() for _ in range(missing)]
        flight = Flight(self, turn, hashes, self.clock.now())
        self.under_way[str(turn.row)] = flight
        self.requests += 1
        self.moved_s = flight.arrived_s
        return flight

    def landed(self, turn: Turn, error: str = "") -> None:
        """It is over, answered or not."""
        del self.under_way[str(turn.row)]
        if error:
            self.errors[error] = self.errors.get(error, 0) + 1

    def read(self, request: GenerateRequest) -> Prompt:
        """A `ReadPrompt`: what the router may know of it."""
        flight = self.under_way[request.request_id]
        return Prompt(flight.turn.prompt_tokens, flight.hashes)

    def known(self, request: GenerateRequest) -> tuple[Content, int, int]:
        """A `Known`: what the engine computes."""
        flight = self.under_way[request.request_id]
        content = HashContent(flight.hashes.copy(), self.fresh)
        return content, flight.turn.prompt_tokens, flight.turn.answer_tokens

    def placed(self, request: GenerateRequest, worker: int, leaper: Leaper) -> None:
        """It goes to that worker."""
        flight = self.under_way[request.request_id]
        flight.worker, flight.leaper = worker, leaper
        self._requests.append(flight.turn.row)
        self._workers.append(worker)
        self._placed_ms.append(self.clock.now() * 1e3)

    @property
    def placings(self) -> Iterator[Placing]:
        """Where requests went, in order."""
        return map(Placing, self._requests, self._workers, self._placed_ms)

    def requests_of(self, worker: int) -> int:
        """How many went to that worker."""
        return self._workers.count(worker)

    def leapt(self, ends: Sequence[float]) -> None:
        """A request got a token at each of `ends`; those of one batch say so one after the other,
        and are counted together."""
        if ends is self._leap:
            self._leapers += 1
            return
        self._count_leap()
        self._leap, self._leapers = ends, 1

    def close(self) -> None:
        """No more comes."""
        self._count_leap()

    def _count_leap(self) -> None:
        add, times = self.gaps.add, self._leapers
        for before, after in pairwise(self._leap):
            add(after - before, times)
        self._leap, self._leapers = (), 0

    def finished(self, flight: Flight, now: float) -> None:
        """Its answer is complete."""
        self.completed += 1
        self.arrived_s.append(flight.arrived_s)
        self.ttft_s.append(flight.first_s - flight.arrived_s)
        self.e2e_s.append(now - flight.arrived_s)
        if flight.tokens_out > 1:
            self.tpot_s.append((now - flight.first_s) / (flight.tokens_out - 1))
        self.prompt_tokens += flight.turn.prompt_tokens
        self.cached_tokens += flight.cached_tokens
        self.output_tokens += flight.tokens_out


Progress = Callable[[FlightLog], None]
