"""Measure the native engine in one process: prefill and decode, compared with the memory bandwidth.

    python benchmarks/native_engine.py [--model FILE_OR_FOLDER] [--batches 1,8,32] [--rounds 3]

Decode rates are tokens per second over all sequences, counted while every sequence is decoding. Prompts
are distinct random ids. The ceiling is one pass over the weights per token at the read bandwidth that
is measured in the same run. Prints medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from array import array
from typing import Any

import numpy as np

from dynamo.core.context import Context
from dynamo.core.reply import Reply
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.engine_sizing import usable_cores
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.thread_pool import ThreadPool
from dynamo.models.checkpoint.decoder_config import DecoderConfig
from dynamo.models.resolve import resolve_model_blocking

rng = np.random.default_rng(int(time.time()))


class TimestampReply(Reply):
    """Records the time of every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def begin(self, started: Any) -> None:
        pass

    def tokens(self, ids: Any, logprobs: Any = None) -> bool:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return True

    def finish(self, end: Any) -> None:
        pass


async def answer(engine: BatchedEngine, size: int, max_tokens: int) -> TimestampReply:
    ids = array("I", rng.integers(100, 40_000, size).tolist()).tobytes()
    stops = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    request = GenerateRequest("bench", "model", ids, SamplingParams(temperature=0), stops)
    stamps = TimestampReply()
    await engine.generate(request, Context("bench"), stamps)
    return stamps


async def prefill(engine: BatchedEngine, size: int) -> float:
    begin = time.perf_counter()
    stamps = await answer(engine, size, 1)
    return size / (stamps.times[0] - begin)


async def decode(engine: BatchedEngine, batch: int, size: int, max_tokens: int) -> float:
    answers = await run_all(*(answer(engine, size, max_tokens) for _ in range(batch)))
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    return sum(begin < at <= end for answer in answers for at in answer.times) / (end - begin)


def read_bandwidth(threads: int) -> float:
    """Return the read bandwidth in bytes per second: the better of sums on every thread and a
    matrix-vector product."""
    data = np.ones(1 << 26, np.float32)
    crew = ThreadPool(threads)
    matrix, vector = data.reshape(-1, 1024), np.ones(1024, np.float32)
    product = np.empty(len(matrix), np.float32)
    best = 0.0
    for _ in range(6):
        for work in (
            lambda: crew.split_rows(len(data), 1, lambda low, high: data[low:high].sum()),
            lambda: np.dot(matrix, vector, out=product),
        ):
            begin = time.perf_counter()
            work()
            best = max(best, data.nbytes / (time.perf_counter() - begin))
    crew.stop()
    return best


def weight_bytes(config: DecoderConfig) -> int:
    """Return the bytes that a token must read: every matrix once."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return 4 * (config.num_layers * layer + config.vocab_size * config.hidden_size)


async def measure(options: argparse.Namespace) -> None:
    files = resolve_model_blocking(options.model, ensure_verified=False)
    with files.open_weights() as weights:
        size = weight_bytes(weights.config)
    cpu = time.process_time()
    settings = EngineSettings(threads=options.threads, prefix_caching=False)
    engine = BatchedEngine(NativeRunner(files.open_weights, settings))
    await engine.start()
    print(f"start: {time.process_time() - cpu:.2f} s of CPU, weights {size / 1e6:.0f} MB")
    await decode(engine, 2, 64, 8)
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        gb = read_bandwidth(options.threads or usable_cores())
        rates.setdefault("read bandwidth, GB/s", []).append(gb / 1e9)
        for tokens in (256, 1024):
            rate = await prefill(engine, tokens)
            rates.setdefault(f"prefill of {tokens}, tokens/s", []).append(rate)
        for batch in options.batches:
            rate = await decode(engine, batch, options.prompt, options.tokens)
            rates.setdefault(f"decode at {batch}, tokens/s", []).append(rate)
            if batch == 1:
                rates.setdefault("decode at 1, share of the ceiling", []).append(rate * size / gb)
    for name, values in rates.items():
        rounds = " ".join(f"{value:.2f}" for value in values)
        print(f"{name:36} {statistics.median(values):8.2f}   ({rounds})")
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="default: the default model")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--batches", type=lambda text: [int(answer) for answer in text.split(",")])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(batches=[1, 8, 32])
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
