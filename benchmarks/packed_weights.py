#!/usr/bin/env python3
"""Would a step be faster with packed weights in memory? Measures what would take their place.

    benchmarks/packed_weights.py [--rows 6144] [--columns 2048]

Prints the CPU time of a matrix in float32 times 1, 8 and 32 vectors. Then that of unpacking it from
Q4_K and Q8_0, which a step with packed weights would do first. Set OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from dynamo.models.checkpoint.quantization import block_layout, dequantize

TYPES = {"Q4_K": 12, "Q8_0": 8}
BATCHES = (1, 8, 32)
ROUNDS = 7


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--columns", type=int, default=2048)
    args = parser.parse_args()
    random = np.random.default_rng(1)
    matrix = random.standard_normal((args.rows, args.columns), np.float32)
    times = {}
    for batch in BATCHES:
        vectors = random.standard_normal((batch, args.columns), np.float32)
        times[batch] = cpu_ms(lambda vectors=vectors: vectors @ matrix.T)  # type: ignore[misc]
        print(f"float32, {batch:2} vectors: {times[batch]:6.1f} ms")
    for name, kind in TYPES.items():
        values, size = block_layout(kind)
        packed = np.ones(matrix.size // values * size, np.uint8)
        unpacked = cpu_ms(lambda kind=kind, packed=packed: dequantize(kind, packed))  # type: ignore[misc]
        shares = ", ".join(f"{unpacked / times[batch]:.1f} at {batch}" for batch in BATCHES)
        print(f"unpacking {name}: {unpacked:6.1f} ms, of the product {shares}")


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the median CPU time of `work` in milliseconds."""
    samples = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        samples.append((time.process_time() - began) * 1e3)
    return sorted(samples)[ROUNDS // 2]


if __name__ == "__main__":
    main()
