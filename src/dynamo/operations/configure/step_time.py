"""The time of a step and of a prompt in closed form, and what follows for a closed loop.

A step reads the weights and the KV of its sequences, multiplies its tokens with the active weights,
exchanges activations between GPUs, and launches its layers. All times are in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from dynamo.operations.configure.cases import DOMAINS, ENGINE_ORDER, CaseArrays, Floats

RESERVED_BYTES = 2.5e9
"""Memory of a GPU for the engine's own buffers."""
LEAST_FREE_SHARE = 0.03
SATURATION_WIDTH = 0.12
"""How softly the time of waiting for memory begins, on the logarithm of load over capacity."""
MAX_PREFILL_LOAD = 0.98
TURNS = 5
"""Turns until latency and running sequences agree."""
FEED_SLACK_MS = 60.0
ARITHMETIC_CLASSES = ("bf16", "fp8", "fp4")


class Forecast(msgspec.Struct, frozen=True):
    """Predicted times of cases. `load` is the logarithm of concurrency over the number of requests
    whose KV fits at once. `prompt_ms` is what one more prompt adds to a step."""

    ttft_ms: Floats
    tpot_ms: Floats
    load: Floats
    prompt_ms: Floats
    first_prompt_ms: Floats


class StepTimes:
    """The formulas, with fitted constants by name (`data/constants.yaml`)."""

    def __init__(self, constants: Mapping[str, float]) -> None:
        self._constants = constants

    def _by_engine(self, name: str, cases: CaseArrays) -> Floats:
        values = [self._constants[f"{name}_{engine}"] for engine in ENGINE_ORDER]
        chosen: Floats = np.array(values)[cases.engine]
        return chosen

    def _by_domain(self, name: str, cases: CaseArrays) -> Floats:
        values = [self._constants[f"{name}_{domain}"] for domain in DOMAINS]
        chosen: Floats = np.array(values)[cases.domain]
        return chosen

    def step_ms(self, cases: CaseArrays, seqs: Floats, context: Floats, tokens: Floats) -> Floats:
        """Return the time of a step with `seqs` decoding sequences of mean `context`, and `tokens`
        new tokens in all."""
        constant = self._constants
        launches = cases.layers * self._by_engine("layer_ms", cases)
        launches += cases.moe_layers * self._by_engine("moe_layer_ms", cases)
        launches += cases.latent * cases.layers * constant["latent_layer_ms"]
        launches += cases.split_experts * cases.moe_layers * constant["split_layer_ms"]
        launches *= self._by_domain("launch", cases)
        read = 1 - (1 - cases.chosen_share) ** np.maximum(tokens, 1)
        copies = np.where(cases.attention_dp, cases.gpus, 1)
        weights = cases.dense_bytes * copies + cases.routed_bytes * read
        share = self._by_domain("weight_bandwidth", cases) * self._by_engine("reading", cases)
        reading = weights / (cases.gpus ** (1 - constant["thin_weights"]) * cases.bandwidth * share)
        computing = self._compute_ms(cases, tokens)
        moving = seqs * cases.kv_bytes(context)
        kv_share = np.where(
            cases.latent,
            self._by_engine("latent_bandwidth", cases),
            self._by_engine("kv_bandwidth", cases),
        )
        moving = moving / (cases.kv_shards * cases.bandwidth * kv_share)
        together = (reading**3 + computing**3) ** (1 / 3)
        result: Floats = launches + together + self._exchange_ms(cases, tokens, 1.0) + moving
        return result

    def prompt_ms(self, cases: CaseArrays) -> Floats:
        """Return the time that the new tokens of one more prompt add to a step."""
        new = cases.isl - cases.prefix
        pairs = new * (cases.prefix + new / 2)
        near = new * np.minimum(cases.prefix + new / 2, cases.window)
        attention = 4 * cases.attention_size * (cases.full_layers * pairs)
        attention += 4 * cases.attention_size * (cases.sliding_layers * near)
        computing = self._compute_ms(cases, new) + attention / (cases.gpus * cases.flops_bf16)
        result: Floats = computing + self._exchange_ms(cases, new, 0.0)
        return result

    def _compute_ms(self, cases: CaseArrays, tokens: Floats) -> Floats:
        names = [f"hopper_{name}" for name in ARITHMETIC_CLASSES]
        names += [f"blackwell_{name}" for name in ARITHMETIC_CLASSES] + ["int4"]
        shares = np.array([self._constants[f"arithmetic_{name}"] for name in names])
        kind = np.where(
            cases.precision == len(ARITHMETIC_CLASSES),
            len(names) - 1,
            cases.precision + len(ARITHMETIC_CLASSES) * (cases.domain > 0),
        )
        chosen = cases.routed_weights * cases.chosen_share / self._constants["moe_arithmetic"]
        work = 2 * tokens * (cases.dense_weights + chosen)
        result: Floats = work / (cases.gpus * cases.flops * shares[kind])
        return result

    def _exchange_ms(self, cases: CaseArrays, tokens: Floats, steps: float) -> Floats:
        """Return the time to exchange activations, with the latency of `steps` steps. Experts of
        GPUs with sequences of their own are sent only the tokens that choose them."""
        sent = np.minimum(np.maximum(cases.chosen, 1), cases.gpus) / cases.gpus
        ring = 2 * (cases.gpus - 1) / cases.gpus
        size = 2 * tokens * cases.hidden * np.where(cases.attention_dp, sent, ring)
        once = size / (cases.link * self._by_domain("link_bandwidth", cases))
        once = once + steps * self._constants["exchange_ms"]
        result: Floats = np.where(cases.gpus > 1, 2 * cases.layers * once, 0.0)
        return result

    def fastest_ms(self, cases: CaseArrays) -> Floats:
        """Return how long reading the weights and the KV of all requests takes at least."""
        chosen = 1 - (1 - cases.chosen_share) ** cases.concurrency
        weights = (cases.dense_bytes + cases.routed_bytes * chosen) / cases.gpus
        moving = cases.concurrency * cases.kv_bytes(cases.isl + cases.osl / 2)
        moving = moving / (cases.kv_shards * cases.stages)
        result: Floats = (weights + moving) / cases.bandwidth
        return result

    def held_weights(self, cases: CaseArrays) -> Floats:
        """Return the bytes of weights that each GPU holds: with attention-DP all that are not
        routed."""
        copied = np.where(cases.attention_dp, cases.dense_bytes * (1 - 1 / cases.gpus), 0.0)
        result: Floats = cases.weight_bytes / (cases.gpus * cases.stages) + copied
        return result

    def free_tokens_bytes(self, cases: CaseArrays) -> Floats:
        """Return the memory for KV of each GPU."""
        free = cases.memory * self._constants["memory_share"] - RESERVED_BYTES
        free = free - self.held_weights(cases)
        result: Floats = np.maximum(free, LEAST_FREE_SHARE * cases.memory)
        return result

    def capacity(self, cases: CaseArrays) -> Floats:
        """Return how many requests' KV a replica holds, each with part of its answer."""
        length = cases.isl + self._constants["reserved_answer"] * cases.osl
        free = self.free_tokens_bytes(cases) * cases.kv_shards * cases.stages
        result: Floats = np.maximum(free / np.maximum(cases.kv_bytes(length), 1.0), 1.0)
        return result

    def forecast(self, cases: CaseArrays, *, prefill: bool = True) -> Forecast:
        """Return the times of a closed loop. Without `prefill` other workers compute the prompts:
        answers are not held up by them."""
        context = cases.isl + cases.osl / 2
        alone = np.ones(cases.count)
        prompt = self.prompt_ms(cases)
        first = prompt + self.step_ms(cases, alone, context, alone)
        added = prompt / cases.stages
        capacity = self.capacity(cases)
        held = np.minimum(cases.concurrency, capacity)
        running, ttft = held * 0.95, first
        tpot = step = first
        for _ in range(TURNS):
            share = running / cases.stages
            step = self.step_ms(cases, share, context, share)
            tpot = step
            if prefill:
                waits = self._by_engine("interference", cases) * np.maximum(held - 1, 0)
                tpot = step + waits * added / cases.osl
            running = np.maximum(held * cases.osl * tpot / (ttft + cases.osl * tpot), 0.5)
            ttft = self._ttft(cases, held, (added, first, step, tpot), ttft)
        load = np.log(cases.concurrency / capacity)
        waiting = SATURATION_WIDTH * np.logaddexp(0, (load - 0.05) / SATURATION_WIDTH)
        over = np.expm1(waiting)
        ttft = ttft + self._constants["waiting"] * over / (1 + 0.5 * over) * cases.osl * tpot
        return Forecast(ttft, tpot, load, added, first)

    def _ttft(
        self,
        cases: CaseArrays,
        held: Floats,
        times: tuple[Floats, Floats, Floats, Floats],
        ttft: Floats,
    ) -> Floats:
        added, first, step, tpot = times
        busy = np.minimum(held * added / (ttft + cases.osl * tpot), MAX_PREFILL_LOAD)
        queue = self._by_engine("queue", cases) * np.log(np.maximum(held, 1)) / 2
        queue += self._constants["busy_queue"] * busy / (1 - busy)
        steady = self._by_engine("overhead_ms", cases) + queue * added
        wave = self._by_engine("wave_queue", cases) * np.maximum(held - 1, 0) / 2 * added
        wave += self._by_engine("wave_overhead_ms", cases)
        result: Floats = first + step / 2 + np.where(cases.first_wave, wave, steady)
        return result
