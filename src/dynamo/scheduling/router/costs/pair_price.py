"""The rules of pairs, and the price of an answer at the worker that decodes, with its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.scheduling.router.features import exceeds_thresholds
from dynamo.scheduling.router.queue import PendingRequest
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.scheduling.workers.worker import WorkerState

if TYPE_CHECKING:
    from dynamo.scheduling.router.worker_arrays import Floats

    Numbers = TypeVar("Numbers", float, Floats)

OFF, ALWAYS, THRESHOLDS, FLEXIBLE = "off", "always", "thresholds", "flexible"
"""Modes of disaggregation; all others compare both ways."""

HELD_BACKLOG_MS = 50.0
"""Backlog from which on a worker gets no further prompt while requests are held, as
`placement.solver.HoldLimits`."""

TARGET_QUEUE_WEIGHT = 2.0
"""Weight of the time of the queue with a target for gaps, where pauses are expensive. All requests
behind the one that does not wait gain, too. Source: 79 prompts of 3,000 tokens a second for 8
flexible workers; with 1, one of three runs keeps 4 prefill workers where 5 are needed."""

QUEUE_SAMPLE = 64
"""Pending requests and workers by which the time of the queue is estimated, so that it is quick."""

FIXED_HARM = 200.0
"""The price in the other modes, where decode workers should rarely compute prompts. Source: the
same trace with 4 prefill and 4 decode workers; 15 to 1,000 tried."""

FIXED_PAUSE_MS = 600.0
"""Pause whose price in those modes is FIXED_HARM. The price of a pause grows with its length, so
that decode workers compute short prompts while prefill workers have a queue. Source: the same trace
at 1x and 3x; with one price for all lengths, decode workers compute long prompts in bursts."""

FIXED_EXPECTED_SENSITIVITY = 0.06
"""Sensitivity of the answers that come to a decode worker during a prompt there. Mode flexible
counts them, with a target for gaps, for prompts that a copy makes necessary."""

PREFILL_SHARE_WEIGHT = 40.0
"""Weight of the share of its time that a decode worker spent on prompts, in units of the harm."""

STEP_WEIGHT = 1.0
"""Weight of a decode step in milliseconds, in units of the harm. Lower weights gather answers on
few workers. Source: the conversation trace at 3x, smeared, with 8 flexible workers; with 0.34 the
mean time between tokens is 12 % longer."""

TARGET_STEP_WEIGHT = 0.34
"""The same with a target for gaps: steps below the target need not be short."""

EXCESS_WEIGHT = 10.0
"""Additional weight of each millisecond of a step above `TARGET_SHARE` of the target, which moves
answers to a further worker before steps miss the target. Source: 79 prompts of 3,000 tokens a
second for 8 flexible workers; without it the 99th percentile of gaps is 31 instead of 26 ms."""
TARGET_SHARE = 0.9

TRANSFER_WEIGHT = 0.2
"""Share of a transfer that is not hidden behind the computing of later chunks."""

ARRIVAL_WEIGHT = 0.02
"""Share of the transfers in front of a transfer, which spreads a burst over equal workers. With ten
times more, the end-to-end time of the conversation trace grows by 4 %."""

FLEXIBLE_TRANSFERS = 8.0
"""Factor of both shares in mode flexible without a target for gaps, where a worker may compute its
own prompt. Source: the conversation trace, smeared, at 64 GB/s with 8 flexible workers. With 1, the
first token takes 5 % longer than with 8 separate workers instead of 2 %."""

MEMORY_LIMIT = 0.9
"""Share of KV memory beyond which each token that the worker lacks costs `MEMORY_MS`."""
MEMORY_MS = 1.0

WAIT_MS = 1000.0
"""Cost of each sequence that has to end before an answer gets a place in the batch. Source:
75 prompts of 700 tokens a second for 6 prefill and 10 decode workers. Without it one decode worker
gets as many short contexts as others get long ones, and first tokens take 3 s."""


class HarmPrice(NamedTuple):
    """The price of pauses for answers, and the target for gaps that steers it, if any.
    `transfers`: the factor of the price of transfers. `asked_share`: the share of removed blocks
    that prompts ask for again."""

    weight: float
    itl_slo_ms: float = 0.0
    transfers: float = 1.0
    asked_share: float = 0.0


AnswerPrice = tuple[str, float, float, float, float]
"""(name, cost of any answer, cost per prompt token, prompt tokens that fit into memory, cost per
moved token) of one decode worker. A NamedTuple would be slower to unpack in `row`."""


class Ways(NamedTuple):
    """Whether the worker that decodes, and whether another worker, may compute a prompt."""

    local: bool
    remote: bool


class Fleet(NamedTuple):
    """The values of all workers that the costs of a few workers depend on.

    `any_prefills`: workers that decode compute prompts for others, too. `any_prefiller`: some
    worker does. `uncached_tokens`: those of the prompt at the best decode worker. `pending`
    returns the number of prompts at prefill workers.
    """

    any_prefills: bool
    any_prefiller: bool
    uncached_tokens: int
    pending: Callable[[], int]


class PairRules:
    """Which workers may compute a prompt in each mode of disaggregation."""

    def __init__(self, settings: DisaggregationSettings) -> None:
        self.update_settings(settings)

    def update_settings(self, settings: DisaggregationSettings) -> None:
        """Apply reloaded settings."""
        self.mode, self._settings = settings.effective_mode, settings

    def is_prefiller(self, worker: WorkerState, any_prefills: bool) -> bool:
        """Whether `worker` computes prompts for others. `any_prefills`: workers that decode, too,
        may do so."""
        return worker.prefills and (any_prefills or not worker.decodes) and self.mode != OFF

    def choose_ways(self, any_prefiller: bool, queue: Callable[[], tuple[int, int]]) -> Ways:
        """Return the allowed ways. `queue` returns the uncached tokens of the prompt at the best
        decode worker, and the number of prompts pending at prefill workers."""
        if not any_prefiller:
            return Ways(local=True, remote=False)
        if self.mode == THRESHOLDS:
            remote = exceeds_thresholds(self._settings, *queue())
            return Ways(not remote, remote)
        return Ways(self.mode != ALWAYS, remote=True)


def queued_prefill_ms(
    requests: Iterable[PendingRequest], workers: Sequence[WorkerState], now: float
) -> float:
    """Return how long the prompts of several pending requests keep the workers busy that compute
    prompts now; 0 for a single request. The time is what a request gains that is computed by a
    worker with answers instead of waiting."""
    pending = [request.prefill_tokens for request in islice(requests, QUEUE_SAMPLE)]
    if len(pending) <= 1:
        return 0.0
    sample = workers[:: -(-len(workers) // QUEUE_SAMPLE)]
    step_ms = sum(worker.step_ms for worker in sample)
    token_ms = sum(worker.token_ms for worker in sample)
    busy = sum(worker.prefill_share(now) for worker in sample) * len(workers) / len(sample)
    prefill_ms = len(pending) * step_ms + sum(pending) * token_ms
    return prefill_ms / len(sample) / max(1.0, busy)


def answer_price(harm: HarmPrice, worker: WorkerState, now: float) -> AnswerPrice:
    """Return the price of an answer at `worker`."""
    decode, factor = worker.latency_model.decode, worker.slowdown.factor
    context = worker.decode_context_tokens + worker.arriving_tokens
    base, per_token = price_answer(
        harm,
        worker.prefill_share(now),
        factor * decode.predict(1.0, context),
        factor * decode.slope * len(worker.active),
        worker.token_transfer_ms * worker.arriving_tokens,
    )
    free = MEMORY_LIMIT * worker.kv_capacity_tokens - context + worker.shared_tokens
    return (
        worker.name,
        base + WAIT_MS * worker.waits_for,
        per_token,
        free,
        price_copied_token(
            harm, worker.token_transfer_ms, worker.token_ms, worker.stall_sensitivity
        ),
    )


def price_long_pause(
    harm: float, sensitivity: Numbers, expected: Numbers, prefill_ms: Numbers
) -> Numbers:
    """Return what the pause of a prefill costs in fixed roles beyond `harm * sensitivity *
    prefill_ms`. `expected`: 1 for workers that decode, else 0."""
    expected_sensitivity = sensitivity + FIXED_EXPECTED_SENSITIVITY * expected
    share = prefill_ms * (1.0 / FIXED_PAUSE_MS)
    return harm * prefill_ms * (expected_sensitivity * share - sensitivity)


def price_answer(
    harm: HarmPrice, share: Numbers, step_ms: Numbers, growth_ms: Numbers, queue_ms: Numbers
) -> tuple[Numbers, Numbers]:
    """Return what an answer costs at one or all decode workers, and what it costs for each token of
    its prompt. `share`: part of the worker's time spent on prompts. `step_ms`: a decode step.
    `growth_ms`: what a token adds to the steps of all answers there. `queue_ms`: the transfers in
    front of this one."""
    step_weight = TARGET_STEP_WEIGHT if harm.itl_slo_ms else STEP_WEIGHT
    base = harm.weight * (PREFILL_SHARE_WEIGHT * share + step_weight * step_ms)
    if harm.itl_slo_ms:
        excess_ms = step_ms - TARGET_SHARE * harm.itl_slo_ms
        base = base + harm.weight * EXCESS_WEIGHT * excess_ms * (excess_ms > 0.0)
    return base + harm.transfers * ARRIVAL_WEIGHT * queue_ms, harm.weight * step_weight * growth_ms


def price_copied_token(
    harm: HarmPrice, transfer_ms: Numbers, token_ms: Numbers, sensitivity: Numbers
) -> Numbers:
    """Return what each token costs that is copied to one or all decode workers. The copy displaces
    a cached token there. `asked_share` of these are computed again, which harms the answers there
    as any prompt does."""
    expected = FIXED_EXPECTED_SENSITIVITY if harm.itl_slo_ms else 0.0
    again_ms = harm.asked_share * token_ms
    transfer = harm.transfers * TRANSFER_WEIGHT * transfer_ms
    return transfer + again_ms * (1.0 + harm.weight * (sensitivity + expected))


def answer_cost(price: AnswerPrice, tokens: int, new: int) -> float:
    """Return the cost of an answer to a prompt of `tokens`, of which the worker lacks `new`."""
    _, base, per_token, free, _ = price
    memory = MEMORY_MS * min(new, new - free) if new > free else 0.0
    return base + per_token * tokens + memory


class SharedPrompts:
    """Counts the blocks of the prompts whose answers a worker writes or will write. Sets
    `WorkerState.shared_tokens`."""

    def __init__(self) -> None:
        self._answers_by_block: dict[WorkerState, dict[int, int]] = {}

    def add(self, placed: PlacedRequest) -> None:
        """Add the prompt of a request at the worker that decodes it."""
        worker = placed.decode_worker or placed.worker
        answers, shared = self._answers_by_block.setdefault(worker, {}), 0
        for block in placed.hashes:
            before = answers.get(block, 0)
            answers[block] = before + 1
            shared += before > 0
        worker.shared_tokens += shared * _block_tokens(worker)

    def remove(self, placed: PlacedRequest) -> None:
        """Remove the prompt of a request. A request that was never added is ignored."""
        worker = placed.decode_worker or placed.worker
        answers, shared = self._answers_by_block.get(worker), 0
        if answers is None:
            return
        for block in placed.hashes:
            after = answers.get(block, 0) - 1
            if after > 0:
                answers[block] = after
                shared += 1
            else:
                answers.pop(block, None)
        worker.shared_tokens -= shared * _block_tokens(worker)
        if not answers:
            del self._answers_by_block[worker]
            worker.shared_tokens = 0


def _block_tokens(worker: WorkerState) -> int:
    return worker.engine_info.block_tokens if worker.engine_info else 0
