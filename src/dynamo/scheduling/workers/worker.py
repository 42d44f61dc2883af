"""The router's model of each worker: the requests placed there, their progress, and the time when
the worker will be free. Worker reports are not needed, since they always arrive late."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from typing import Protocol

import msgspec
from msgspec.structs import replace

from dynamo.core.values import BOTH_ROLES, EngineInfo, Load
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.latency_model import (
    OUTLIER_RATIO,
    PrefillGroup,
    WorkerLatencyModel,
    WorkerSlowdown,
)
from dynamo.scheduling.workers.slots import WorkerCapacity
from dynamo.scheduling.workers.tier_queues import TierQueues

DEFAULT_MAX_BATCHED_TOKENS = 8_192
"""Prompt tokens in one step of a worker that does not announce a limit."""
DEFAULT_MAX_SEQUENCES = 256
"""Concurrent requests of a worker that does not announce a limit."""
REFRESH_INTERVAL_S = 0.1
"""Age from which the sums over a worker's requests are computed again."""
SAME_STEP_S = 0.001
"""First tokens closer together than this came from one step."""
PREFILL_SHARE_S = 3.0
"""Time over which the share of prefill is measured. A longer one would keep workers apart late."""
STALL_HALVING_TOKENS = 50.0
"""Length at which an answer suffers half as much from a pause as a new answer does."""
DEFAULT_TOKEN_BYTES = 131_072.0
"""Size of a token's KV in a model of 8 billion parameters."""
INITIAL_TRANSFER_BYTES_PER_S = 8e9
"""Rate at which a worker gets KV of others until its first report names another one."""


def engine_info(instance: Instance, rank: int | None = None) -> EngineInfo | None:
    """Return the engine description that the instance announced, if any that can be read. With a
    `rank`, return the share of one rank."""
    try:
        info = msgspec.convert(instance.capabilities.get("engine"), EngineInfo | None)
    except msgspec.ValidationError:
        info = None
    if info is None or rank is None:
        return info
    blocks, slots = info.num_blocks // info.data_parallel, info.max_num_seqs // info.data_parallel
    return replace(info, num_blocks=blocks, max_num_seqs=max(1, slots), data_parallel=1)


def predict_token_transfer_ms(instance: Instance, bytes_per_s: float) -> float:
    """Return the time to move a token's KV to the instance, by the size of the blocks in the memory
    that it exposes to other workers. 0 `bytes_per_s`: no rate is known."""
    capabilities = instance.capabilities
    try:
        slot_bytes = float(capabilities["transfer"][0]["slot_bytes"])
        token_bytes = slot_bytes / int(capabilities["engine"]["block_tokens"])
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        token_bytes = DEFAULT_TOKEN_BYTES
    return token_bytes / (bytes_per_s or INITIAL_TRANSFER_BYTES_PER_S) * 1e3


class RequestAtWorker(Protocol):
    """The part of a `PlacedRequest` that the model of its worker reads and writes."""

    prompt_tokens: int
    new_tokens: int
    load_ms: float
    placed_s: float
    expected_first_token_s: float
    first_token_s: float | None
    prefill_ms_at_first_token: float
    max_tokens: int
    peer: str
    counted: bool
    updates_model: bool
    decode_worker: WorkerState | None

    @property
    def emitted(self) -> int: ...


class WorkerState:
    """The router's model of one worker, or of one of its data-parallel ranks. `names`: those by
    which requests exclude it, its own and that of its instance. Names in `_s` are
    seconds of the router's clock, names in `_ms` are durations. `pending_prefills`,
    `pending_prefill_tokens`: prompts without a first token. `prefill_free_s`: expected first token
    of the last of them. `decode_context_tokens`: context of all decoding requests, of which
    `shared_tokens` are counted more than once.
    `stall_sensitivity`: sum over active requests of 1 / (emitted tokens + 50). `load`: the worker's
    last report. `external_prefill_tokens`: prompt tokens in it that other routers sent. `slots`:
    the places for requests. `active`: the requests that are here, `arriving`: those whose prompts
    other workers compute for this one. The ledger writes both, and `prompts`, the number of own
    requests whose prompts are computed here for others. `live`: it may be chosen.
    `prefill_busy_s`: the seconds of prefill until `prefill_busy_at_s`, where older ones count less.
    Every change of a predicted prefill or decode step adds the worker to the set `changed`."""

    __slots__ = (
        "_changed",
        "_prefill_cancelled",
        "_prefill_group",
        "_refreshed_s",
        "active",
        "arriving",
        "arriving_tokens",
        "decode_context_tokens",
        "decodes",
        "engine_info",
        "external_prefill_tokens",
        "instance",
        "kv_capacity_tokens",
        "latency_model",
        "live",
        "load",
        "max_sequences",
        "name",
        "names",
        "pending_prefill_tokens",
        "pending_prefills",
        "prefill_busy_at_s",
        "prefill_busy_s",
        "prefill_free_s",
        "prefills",
        "prompts",
        "rank",
        "shared_tokens",
        "slots",
        "slowdown",
        "stall_sensitivity",
        "step_ms",
        "tier_queues",
        "token_budget",
        "token_ms",
        "token_transfer_ms",
        "total_prefill_ms",
    )

    def __init__(
        self,
        name: str,
        instance: Instance,
        model: WorkerLatencyModel,
        changed: set[WorkerState],
        rank: int | None = None,
    ) -> None:
        self.name = name
        self.names = frozenset((name, instance.id))
        self._changed = changed
        self.rank = rank
        self.latency_model = model
        self.slowdown = WorkerSlowdown()
        self.active: dict[str, RequestAtWorker] = {}
        self.pending_prefill_tokens = 0
        self.live, self.slots, self.prompts = False, WorkerCapacity(), 0
        self.pending_prefills = 0
        self.prefill_free_s = 0.0
        self.total_prefill_ms = 0.0
        self.arriving: dict[str, RequestAtWorker] = {}
        self.arriving_tokens = 0
        self.decode_context_tokens = self.shared_tokens = 0
        self.stall_sensitivity = 0.0
        self.load: Load | None = None
        self.tier_queues: TierQueues | None = None
        self.external_prefill_tokens = 0
        self._refreshed_s = float("-inf")
        self._prefill_group = PrefillGroup(0.0, 0.0, 0, 0)
        self._prefill_cancelled = False
        self.prefill_busy_s = self.prefill_busy_at_s = 0.0
        self._update_step_times()
        self.update_instance(instance)

    def update_instance(self, instance: Instance) -> None:
        """Apply the instance's discovery record."""
        self.instance = instance
        self.engine_info = info = engine_info(instance, self.rank)
        roles = info.roles if info else BOTH_ROLES
        self.prefills, self.decodes = "prefill" in roles, "decode" in roles
        self.max_sequences = info.max_num_seqs if info else DEFAULT_MAX_SEQUENCES
        self.kv_capacity_tokens = info.num_blocks * info.block_tokens if info else inf
        self.token_budget = info.max_num_batched_tokens if info else DEFAULT_MAX_BATCHED_TOKENS
        self.update_transfer_rate(self.load.transfer_bytes_per_s if self.load else 0.0)
        self._changed.add(self)

    def refresh(self, now: float) -> None:
        """Recompute the sums over active requests if they are older than REFRESH_INTERVAL_S.
        Between refreshes the sums follow arrivals and ends, but not the growth of answers."""
        if now - self._refreshed_s < REFRESH_INTERVAL_S:
            return
        self._refreshed_s = now
        context, sensitivity = 0, 0.0
        for placed in self.active.values():
            emitted = placed.emitted
            if placed.decode_worker is None:
                sensitivity += 1.0 / (emitted + STALL_HALVING_TOKENS)
            if placed.first_token_s is not None:
                context += placed.prompt_tokens + emitted
        self.decode_context_tokens = context
        self.stall_sensitivity = sensitivity + len(self.arriving) / STALL_HALVING_TOKENS
        self._update_step_times()

    def predict_prefill_ms(self, new_tokens: int) -> float:
        """Return the time from the start of a prompt's first step to its first token."""
        steps = -(-new_tokens // self.token_budget)
        return steps * self.step_ms + self.token_ms * new_tokens

    def backlog_ms(self, now: float) -> float:
        """Return the remaining time of all pending prefills. A late prefill counts for as long
        again as it is late, since it is not done whatever was predicted."""
        return abs(self.prefill_free_s - now) * 1e3 if self.pending_prefills else 0.0

    def prefill_share(self, now: float) -> float:
        """Return the share of its time that the worker spends on prompts, 0 to 1: of the last
        PREFILL_SHARE_S seconds, with the pending prompts."""
        busy_s = self.prefill_busy_s * exp((self.prefill_busy_at_s - now) / PREFILL_SHARE_S)
        return min(1.0, (busy_s + self.backlog_ms(now) * 1e-3) / PREFILL_SHARE_S)

    def kv_cache_usage(self) -> float:
        """Return the used share of KV memory, 0 to 1: the last report plus pending prompts.
        Without a report, the model's own context count replaces it."""
        load, info = self.load, self.engine_info
        if load is not None and load.total_blocks:
            share, context = load.active_blocks / load.total_blocks, 0
        else:
            share, context = 0.0, self.decode_context_tokens
        if info is not None:
            share += (context + self.pending_prefill_tokens) / (info.num_blocks * info.block_tokens)
        return min(share, 1.0)

    def on_load_report(self, load: Load) -> None:
        """Keep a load report; requests that this router placed are not counted as external."""
        if self.load is None or load.transfer_bytes_per_s != self.load.transfer_bytes_per_s:
            self.update_transfer_rate(load.transfer_bytes_per_s)
        self.load = load
        self.external_prefill_tokens = max(0, load.prefill_tokens - self.pending_prefill_tokens)

    def start_from(self, timing: Sequence[float]) -> None:
        """Predict by the step times that the worker has learnt, until answers tell them."""
        model = self.latency_model
        if not (model.prefill.observation_count or model.decode.observation_count):
            model.start_from(timing)
            self._update_step_times()

    def update_transfer_rate(self, bytes_per_s: float) -> None:
        """Set the time to move a token's KV to the worker; 0: no rate is known."""
        self.token_transfer_ms = predict_token_transfer_ms(self.instance, bytes_per_s)
        self._changed.add(self)

    @property
    def waits_for(self) -> int:
        """The sequences that have to end before a further answer gets a place in the batch."""
        return max(0, len(self.active) + len(self.arriving) + 1 - self.max_sequences)

    def load_factor(self) -> float:
        """Return the load, 0 to 1: the larger share of a step's tokens or of sequence slots."""
        share = len(self.active) / self.max_sequences
        return min(1.0, max(self.pending_prefill_tokens / self.token_budget, share))

    def place(self, placed: RequestAtWorker, now: float) -> None:
        """Add a request that is sent to the worker now, or of another router and decodes already.
        If another worker decodes it, prompts there would delay it, and prompts here would not."""
        placed.counted = True
        self._changed.add(self)
        if placed.first_token_s is not None:
            placed.updates_model = False
            self._refreshed_s = float("-inf")
            return
        prefill_ms = self.predict_prefill_ms(placed.new_tokens)
        backlog_ms = shared_ms = self.backlog_ms(now)
        if self.pending_prefills:  # pending prompts share steps
            shared_ms = min(backlog_ms, self.predict_prefill_ms(self.pending_prefill_tokens))
        if placed.load_ms > shared_ms:  # a load takes place during the backlog
            shared_ms = placed.load_ms
            backlog_ms = max(backlog_ms, shared_ms)
        self.prefill_free_s = now + backlog_ms * 1e-3 + prefill_ms * 1e-3
        placed.expected_first_token_s = now + (shared_ms + prefill_ms) * 1e-3
        self.pending_prefills += 1
        self.pending_prefill_tokens += placed.new_tokens
        self.stall_sensitivity += 1.0 / STALL_HALVING_TOKENS
        if (target := placed.decode_worker) is not None:
            target.arriving_tokens += placed.prompt_tokens
            self.move_sensitivity(target)

    def hand_over(self, placed: RequestAtWorker, target: WorkerState) -> None:
        """Move a request with its first token to the worker that decodes it."""
        self.decode_context_tokens = max(0, self.decode_context_tokens - placed.prompt_tokens)
        target.arriving_tokens -= placed.prompt_tokens
        target.decode_context_tokens += placed.prompt_tokens
        placed.prefill_ms_at_first_token = target.total_prefill_ms
        self._changed.update((self, target))

    def move_sensitivity(self, target: WorkerState) -> None:
        """Move the sensitivity of one request without a token to another worker."""
        share = 1.0 / STALL_HALVING_TOKENS
        self.stall_sensitivity = max(0.0, self.stall_sensitivity - share)
        target.stall_sensitivity += share
        self._changed.update((self, target))

    def on_cached_tokens(self, placed: RequestAtWorker, tokens: int) -> None:
        """Subtract prompt tokens that the worker found in its cache."""
        if placed.first_token_s is None and placed.counted:
            saved = min(tokens, placed.new_tokens - 1)
            placed.new_tokens -= saved
            self.pending_prefill_tokens -= saved
            self._changed.add(self)

    def on_first_token(self, placed: RequestAtWorker, now: float) -> None:
        """Note that the prefill is done."""
        if placed.updates_model:
            self._observe_prefill(placed, now)
        self._finish_prefill(placed, now)
        self.decode_context_tokens += placed.prompt_tokens
        placed.prefill_ms_at_first_token = self.total_prefill_ms

    def remove(self, placed: RequestAtWorker, now: float) -> None:
        """Remove a request that left the worker."""
        placed.counted = False
        if (target := placed.decode_worker) is not None:
            target.arriving_tokens -= placed.prompt_tokens
            target.move_sensitivity(self)
        emitted = placed.emitted
        share = 1.0 / (emitted + STALL_HALVING_TOKENS)
        self.stall_sensitivity = max(0.0, self.stall_sensitivity - share)
        if placed.first_token_s is None:
            self._finish_prefill(placed, now)
            self._prefill_cancelled = True
            return
        if placed.updates_model:
            self._observe_decode(placed, emitted, now)
        context = placed.prompt_tokens + emitted
        self.decode_context_tokens = max(0, self.decode_context_tokens - context)
        self._update_step_times()

    def _finish_prefill(self, placed: RequestAtWorker, now: float) -> None:
        self.pending_prefills -= 1
        self.pending_prefill_tokens -= placed.new_tokens
        if self.pending_prefills == 0:
            self.prefill_free_s = now
            self._observe_prefill_group()
        elif self.prefill_free_s < now:
            self.prefill_free_s = now + self.predict_prefill_ms(self.pending_prefill_tokens) * 1e-3
        self._update_step_times()

    def _update_step_times(self) -> None:
        model, factor = self.latency_model, self.slowdown.factor
        context = self.decode_context_tokens
        decode_ms = model.decode.predict(1.0, context) if context else 0.0
        self.step_ms = factor * (model.prefill.base + decode_ms)
        self.token_ms = factor * model.prefill.slope
        self._changed.add(self)

    def _observe_prefill(self, placed: RequestAtWorker, now: float) -> None:
        """Add a prompt to the current group, or start a new group. Prompts whose first tokens come
        together are one observation. The observation is made when the next first token comes or no
        prefill is pending. Its duration counts from the step before, or from the placement if the
        worker was idle."""
        group = self._prefill_group
        delayed, self._prefill_cancelled = self._prefill_cancelled, False
        if group.tokens and now - group.end_s < SAME_STEP_S:
            group.end_s = now
            group.tokens += placed.new_tokens
            return
        self._observe_prefill_group()
        start = max(group.end_s, placed.placed_s + placed.load_ms * 1e-3)
        context = self.decode_context_tokens
        self._prefill_group = PrefillGroup(start, now, placed.new_tokens, context, delayed)

    def _observe_prefill_group(self) -> None:
        group = self._prefill_group
        if not group.tokens:
            return
        self._prefill_group = PrefillGroup(group.end_s, group.end_s, 0, 0)
        tokens, context = group.tokens, group.context
        steps = -(-tokens // self.token_budget)
        duration_ms = (group.end_s - group.start_s) * 1e3
        model, factor = self.latency_model, self.slowdown.factor
        decode_ms = steps * model.decode.predict(1.0, context) if context else 0.0
        expected_ms = model.prefill.predict(steps, tokens)
        self.total_prefill_ms += expected_ms * factor
        decay = exp((self.prefill_busy_at_s - group.end_s) / PREFILL_SHARE_S)
        self.prefill_busy_s = self.prefill_busy_s * decay + expected_ms * factor * 1e-3
        self.prefill_busy_at_s = group.end_s
        if group.delayed and duration_ms > expected_ms + decode_ms:
            return  # most of it may be the step of a cancelled prompt
        known = not model.prefill.excess(steps, tokens)
        model.prefill.observe(steps, tokens, duration_ms / factor - decode_ms)
        if known or duration_ms < OUTLIER_RATIO * (expected_ms + decode_ms):
            self.slowdown.observe(expected_ms + decode_ms, duration_ms)

    def _observe_decode(self, placed: RequestAtWorker, emitted: int, now: float) -> None:
        """Learn from the mean time between tokens, less the prefills in between."""
        if placed.first_token_s is None or emitted < 8:
            return
        prefill_ms = self.total_prefill_ms - placed.prefill_ms_at_first_token
        decode_ms = (now - placed.first_token_s) * 1e3 - prefill_ms
        step_ms = decode_ms / (emitted - 1) / self.slowdown.factor
        self.latency_model.decode.observe(1.0, self.decode_context_tokens, step_ms)
