"""Decode rate of llama.cpp and of the native engine: one stream, the default model, side by side.

    .venv/bin/python benchmarks/llamacpp_beside_native.py [--rounds 5] [--tokens 100] [--threads 2]

Rounds alternate. The first token, which includes the prompt, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.reply import Engine, LogprobsPerToken
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.llamacpp.engine import LlamaCppEngine
from dynamo.inference.llamacpp.server import ServerSizes
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.resolve import resolve_model_blocking
from dynamo.testing.fakes import CollectedReply

PROMPT = tuple(range(300, 364))
CONTEXT_TOKENS = 1024


class TimedReply(CollectedReply):
    """A reply that keeps the time of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        self.times.append(time.perf_counter())
        return super().tokens(ids, logprobs)


async def decode_rate(engine: Engine, tokens: int) -> float:
    """Return the tokens a second of one greedy answer after its first token."""
    stops = StopConditions(max_tokens=tokens, ignore_eos=True)
    request = GenerateRequest("r", "m", pack_ids(PROMPT), SamplingParams(temperature=0), stops)
    reply = TimedReply()
    await engine.generate(request, Context("r"), reply)
    return (len(reply.times) - 1) / (reply.times[-1] - reply.times[0])


async def run(rounds: int, tokens: int, threads: int) -> None:
    files = resolve_model_blocking("")
    settings = EngineSettings(threads=threads, num_blocks=256)
    engines: dict[str, Engine] = {
        "native": BatchedEngine(NativeRunner(files.open_weights, settings)),
        "llama.cpp": LlamaCppEngine(
            files.path,
            ServerSizes(slots=1, context_tokens=CONTEXT_TOKENS, threads=threads),
            vocab_size=files.metadata.vocab_size,
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        await engine.start()
    for _ in range(rounds):
        for name, engine in engines.items():
            rates[name].append(await decode_rate(engine, tokens))
    for name, engine in engines.items():
        await engine.stop()
        low, high = min(rates[name]), max(rates[name])
        median = statistics.median(rates[name])
        print(f"{name:10} {median:6.1f} tokens/s (median of {rounds}, {low:.1f} to {high:.1f})")
    ratio = statistics.median(rates["llama.cpp"]) / statistics.median(rates["native"])
    print(f"llama.cpp / native: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    asyncio.run(run(args.rounds, args.tokens, args.threads))


if __name__ == "__main__":
    main()
