"""Measure structured output in the native engine, on the default model.

    python benchmarks/structured_output.py [--schemas 20] [--seeds 10] [--maskbench FILE_OR_FOLDER]
        [--streams 1,8,32] [--parts answers,maskbench,rate]

- answers: bounded schemas at temperature 1. Every answer has to parse, to be valid and to end by `stop`.
- maskbench: a file of JSON lines (.gz or not), each {"id", "schema", "tests": [{"valid", "data"}]}. The
  part counts schemas that judge every instance right, accepted invalid instances, and refused schemas.
- rate: decode tokens/s with a structured output and without, alternating, in one engine.

`benchmarks/structured_output_http.py` measures the same over HTTP, and forced calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest
from dynamo.core.reply import Reply
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    StructuredOutput,
)
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.grammar.checker import GrammarChecker
from dynamo.models.grammar.matcher import GrammarCompiler
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import Tokenizer, load_tokenizer

WORDS = ("colour", "city", "size", "name", "price", "month", "animal", "level")


def make_schema(number: int) -> dict[str, Any]:
    """Return an object of bounded strings, numbers, choices and lists."""
    chance = Random(number)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 16},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"enum": ["red", "green", "blue"]},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        {"type": "string", "pattern": "^[a-z]{2,6}$"},
    ]
    names = chance.sample(WORDS, chance.randint(2, 4))
    properties = {name: chance.choice(kinds) for name in names}
    required = {"required": names, "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def is_valid(schema: Any, value: Any) -> bool:
    """Validate by the schemas of `make_schema` only."""
    import re

    if "enum" in schema:
        return value in schema["enum"]
    kind = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    if type(value) is not kind[schema["type"]]:
        return False
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 99) and (
            re.search(schema.get("pattern", ""), value) is not None
        )
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if isinstance(value, list):
        return len(value) <= schema["maxItems"] and all(is_valid(schema["items"], v) for v in value)
    properties = schema["properties"]
    return set(schema["required"]) <= value.keys() <= properties.keys() and all(
        is_valid(properties[key], item) for key, item in value.items()
    )


class Collector(Reply):
    """Collects the tokens of an answer, and the time of each."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self.reason = ""

    def begin(self, started: Any) -> None:
        pass

    def tokens(self, ids: Any, logprobs: Any = None) -> bool:  # noqa: ARG002
        self.ids += ids
        self.times.append(time.perf_counter())
        return True

    def finish(self, end: Finish) -> None:
        self.reason = end.reason


async def generate(engine: BatchedEngine, request: GenerateRequest) -> Collector:
    collector = Collector()
    await engine.generate(request, Context(request.request_id), collector)
    return collector


async def measure_answers(
    engine: BatchedEngine, tokenizer: Tokenizer, schemas: int, seeds: int
) -> None:
    right = 0
    for number in range(schemas):
        schema = make_schema(number)
        form = StructuredOutput("json_schema", json.dumps(schema))
        text = "<|im_start|>user\nDescribe something as JSON.<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text)
        requests = [
            GenerateRequest(
                f"{number}-{seed}",
                "m",
                prompt,
                SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=seed),
                StopConditions(max_tokens=600),
                structured=form,
            )
            for seed in range(seeds)
        ]
        for answer in await run_all(*(generate(engine, request) for request in requests)):
            text = tokenizer.decode(answer.ids)
            try:
                valid = is_valid(schema, json.loads(text))
            except ValueError:
                valid = False
            right += valid and answer.reason == "stop"
            if not (valid and answer.reason == "stop"):
                print("wrong:", answer.reason, text, json.dumps(schema))
    print(f"answers: {right} of {schemas * seeds} parse, are valid and end by stop")


def read_maskbench(path: Path) -> Iterator[Any]:
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        content = file.read_bytes()
        lines = gzip.decompress(content) if file.suffix == ".gz" else content
        yield from map(json.loads, lines.splitlines())


async def measure_maskbench(path: Path, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    checker, counts = GrammarChecker(), Counter[str]()
    refusals, times = Counter[str](), list[float]()
    for case in read_maskbench(path):
        form = StructuredOutput("json_schema", json.dumps(case["schema"]))
        started = time.perf_counter()
        try:
            await checker.check(form)
        except InvalidRequest as error:
            counts["refused"] += 1
            refusals[error.message.partition("enforced: ")[2].split(" at ")[0][:40]] += 1
            continue
        times.append((time.perf_counter() - started) * 1e3)
        good = True
        for test in case["tests"]:
            matcher = compiler.open_matcher(form)
            text = json.dumps(test["data"], ensure_ascii=False)
            ids = [*memoryview(tokenizer.encode(text)).cast("I")]
            accepted = matcher.feed(ids, 0) and (matcher.finished or _may_end(matcher))
            counts["invalid accepted"] += accepted and not test["valid"]
            good = good and accepted == test["valid"]
        counts["right" if good else "wrong"] += 1
    times.sort()
    print(f"maskbench: {dict(counts)}; refused for {dict(refusals)}")
    print(f"trial of a new schema: median {statistics.median(times):.1f} ms, p99 {_p99(times):.1f}")


def _may_end(matcher: Any) -> bool:
    mask = matcher.mask()
    return bool(mask and mask[0] >> 2 & 1)  # token 2 ends answers of the default model


def _p99(times: Sequence[float]) -> float:
    return times[int(len(times) * 0.99)]


async def measure_rate(engine: BatchedEngine, tokenizer: Tokenizer, streams: int) -> None:
    item = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}}
    item |= {"required": ["name"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": 40, "maxItems": 40}
    form = StructuredOutput("json_schema", json.dumps(schema))
    rates: dict[bool, list[float]] = {False: [], True: []}
    for round_number in range(5):
        for constrained in (False, True) if round_number % 2 else (True, False):
            requests = [
                GenerateRequest(
                    str(number),
                    "m",
                    tokenizer.encode(f"Names, list {round_number} {number} {constrained}:"),
                    SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=number),
                    StopConditions(max_tokens=96, ignore_eos=True),
                    structured=form if constrained else None,
                )
                for number in range(streams)
            ]
            answers = await run_all(*(generate(engine, request) for request in requests))
            begin = max(answer.times[0] for answer in answers)
            end = min(answer.times[-1] for answer in answers)
            count = sum(begin <= at <= end for answer in answers for at in answer.times)
            rates[constrained].append(count / (end - begin))
    free, constrained_rate = (statistics.median(rates[name]) for name in (False, True))
    ratio = constrained_rate / free
    print(
        f"{streams} streams: free {free:.1f} tokens/s, constrained {constrained_rate:.1f}: {ratio:.3f}"
    )


async def measure(args: argparse.Namespace) -> None:
    files = resolve_model_blocking(ensure_verified=False)
    card = files.build_card(context_tokens=2048)
    tokenizer = load_tokenizer(card.tokenizer)
    compiler = GrammarCompiler(Path(card.tokenizer.path), card.eos_token_ids)
    parts = args.parts.split(",")
    if "maskbench" in parts and args.maskbench:
        await measure_maskbench(args.maskbench, compiler, tokenizer)
    settings = EngineSettings(max_num_seqs=32)
    engine = BatchedEngine(
        NativeRunner(files.open_weights, settings, context_tokens=2048),
        eos_token_ids=card.eos_token_ids,
        grammars=compiler,
    )
    await engine.start()
    if "answers" in parts:
        await measure_answers(engine, tokenizer, args.schemas, args.seeds)
    for streams in map(int, args.streams.split(",")) if "rate" in parts else ():
        await measure_rate(engine, tokenizer, streams)
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--maskbench", type=Path)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--parts", default="answers,maskbench,rate")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
