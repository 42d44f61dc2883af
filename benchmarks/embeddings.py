"""Tokens per second of the embedding model, beside its matrix products alone.

Both run on all cores, alternating, for several lengths of texts. The ceiling multiplies matrices of the
shapes that one pass over the model has and does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.embedding.server import STEP_TOKENS, EmbeddingBatcher, load_encoder
from dynamo.models.embedding_model import EmbeddingModel, read_embedding_model
from dynamo.models.resolve import resolve_model_blocking

LENGTHS = (16, 64, 256)
TOKENS = 16 * STEP_TOKENS


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="minilm", help="folder of an embedding model")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def multiply(model: EmbeddingModel, inner: int, tokens: int) -> None:
    """Multiply as one pass over `tokens` tokens does, without anything between."""
    hidden = model.hidden_size
    rows, wide = np.ones((tokens, hidden), np.float32), np.ones((tokens, inner), np.float32)
    up, down = np.ones((hidden, inner), np.float32), np.ones((inner, hidden), np.float32)
    qkv, output = np.ones((hidden, 3 * hidden), np.float32), np.ones((hidden, hidden), np.float32)
    for _ in range(model.num_hidden_layers):
        for left, right in ((rows, qkv), (rows, output), (rows, up), (wide, down)):
            np.matmul(left, right)


def time_ceiling(model: EmbeddingModel, inner: int, threads: int) -> float:
    """Return the seconds of the matrix products of TOKENS tokens."""
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        steps = TOKENS // STEP_TOKENS
        list(pool.map(lambda _: multiply(model, inner, STEP_TOKENS), range(steps)))
        return time.perf_counter() - started


async def time_model(encoder: Any, threads: int, length: int) -> float:
    """Return the seconds in which TOKENS tokens are embedded, in texts of `length` tokens."""
    texts = [tuple(range(1000, 1000 + length))] * (TOKENS // length)
    batcher = EmbeddingBatcher(encoder, threads)
    async with BackgroundTasks() as tasks:
        tasks.start(batcher.run())
        started = time.perf_counter()
        await batcher.embed(texts)
        seconds = time.perf_counter() - started
        await tasks.close()
    batcher.close()
    return seconds


async def main() -> None:
    """Print one line for each length."""
    options = parse_arguments()
    folder = resolve_model_blocking(options.model).path
    model = read_embedding_model(folder)
    encoder = load_encoder(folder, model)
    inner = json.loads((folder / "config.json").read_text())["intermediate_size"]
    threads = len(os.sched_getaffinity(0))
    for length in LENGTHS:
        pairs = [
            (await time_model(encoder, threads, length), time_ceiling(model, inner, threads))
            for _ in range(options.rounds)
        ]
        ratio = statistics.median(ceiling / seconds for seconds, ceiling in pairs)
        rate = TOKENS / statistics.median(seconds for seconds, _ in pairs)
        print(
            f"{length:4} tokens a text: {rate:6,.0f} tokens/s, {ratio:.2f} of the matrix products"
        )


if __name__ == "__main__":
    asyncio.run(main())
