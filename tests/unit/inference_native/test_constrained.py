"""Forms of answers in the native engine: masks, the end, and every way in which tokens arrive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.unit.inference.conftest import RecordingReply
from tests.unit.inference_native.test_native_disaggregation import NativePair

from dynamo.core.codec import pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import SchemaTooComplex, Unsupported
from dynamo.core.tasks import run_all
from dynamo.core.values import SamplingParams, StopConditions, StructuredOutput
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native.sampling import sample_filtered, sample_masked
from dynamo.inference.sequence import EngineSequence
from dynamo.models.grammar.matcher import GrammarCompiler, GrammarMatcher

ITEM = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 3, "maxItems": 3}
FORM = StructuredOutput("json_schema", json.dumps(LIST))
PROMPT = [5, 9, 40, 77, 101]
SEEDED = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=4)


@pytest.fixture
def grammars(tiny_model: Path, tmp_path: Path) -> GrammarCompiler:
    """A compiler for the first 320 tokens of the tokenizer, which are those of the tiny llama."""
    document = json.loads((tiny_model / "tokenizer.json").read_text())
    model = document["model"]
    model["vocab"] = {text: token for text, token in model["vocab"].items() if token < 320}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return GrammarCompiler(tmp_path / "tokenizer.json", [2])


async def answer(engine: BatchedEngine, request: Any) -> RecordingReply:
    reply = RecordingReply()
    await engine.generate(request, Context("r"), reply)
    return reply


@pytest.mark.parametrize("sampling", [SEEDED, SamplingParams(temperature=0)], ids=str)
async def test_the_answer_has_its_form_and_ends_with_stop(
    make_engine: Any, make_request: Any, grammars: GrammarCompiler, tokenizer: Any, sampling: Any
) -> None:
    engine = make_engine(grammars=grammars)
    info = await engine.start()
    assert {"structured", "calls"} <= set(info.features)
    stops = StopConditions(max_tokens=300, min_tokens=300, ignore_eos=True)
    request = make_request(PROMPT, 0, stops=stops, structured=FORM, sampling=sampling)
    reply = await answer(engine, request)
    assert reply.end is not None
    assert reply.end.reason == "stop"
    values = json.loads(tokenizer.decode(reply.ids))
    assert len(values) == 3
    assert all(item["kind"] in ("red", "green") and item["size"] <= 99 for item in values)
    await engine.stop()


async def test_every_way_of_computing_gives_the_same_answer(
    make_engine: Any, make_request: Any, grammars: GrammarCompiler
) -> None:
    """Alone, preempted beside others, continued after a break, and with a prompt from a peer."""
    alone = make_engine(grammars=grammars)
    await alone.start()
    request = make_request(PROMPT, 300, structured=FORM, sampling=SEEDED)
    expected = (await answer(alone, request)).ids
    free = make_request(PROMPT, len(expected), sampling=SEEDED)
    free_expected = (await answer(alone, free)).ids

    for count in (1, len(expected) // 2, len(expected) - 1):
        ids = pack_ids([*PROMPT, *expected[:count]])
        resumed = replace(request, token_ids=ids, resumed=count)
        assert (await answer(alone, resumed)).ids == expected[count:]
    await alone.stop()

    blocks = (len(PROMPT) + len(expected)) // 4 + 2  # of one answer, with the end
    crowded = make_engine(grammars=grammars, num_blocks=blocks)
    await crowded.start()
    requests = [request, free, replace(request, choice=0), free]
    replies = await run_all(*(answer(crowded, entry) for entry in requests))
    assert crowded.totals().preemptions
    assert [reply.ids for reply in replies] == [expected, free_expected] * 2
    await crowded.stop()

    pair = NativePair(make_engine(grammars=grammars), make_engine(grammars=grammars))
    await pair.start()
    moved = await answer(pair.d, replace(request, prefill="p"))
    assert moved.ids == expected
    assert moved.end is not None
    assert moved.end.reason == "stop"
    assert pair.peer.prompts
    for engine in (pair.p, pair.d):
        await engine.stop()


def record_preemptions(engine: BatchedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the length of the answer of each preempted sequence."""
    lengths: list[int] = []
    preempt = engine.scheduler._preempt

    def record(sequence: EngineSequence) -> None:
        lengths.append(sequence.length - sequence.prompt_tokens)
        preempt(sequence)

    monkeypatch.setattr(engine.scheduler, "_preempt", record)
    return lengths


async def test_a_limit_of_reasoning_holds_in_every_way_of_computing(
    make_engine: Any,
    make_request: Any,
    grammars: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer begins inside of reasoning, which token 0 ends."""
    form = StructuredOutput("text", reasoning_end=pack_ids([0]), reasoning_limit=24)
    request = make_request(PROMPT, 32, structured=form, sampling=SEEDED)
    engine = make_engine(grammars=grammars)
    await engine.start()
    free = (await answer(engine, replace(request, structured=None))).ids
    expected = (await answer(engine, request)).ids
    assert expected[:25] == [*free[:24], 0]
    for count in (3, 24, 25):
        ids = pack_ids([*PROMPT, *expected[:count]])
        resumed = replace(request, token_ids=ids, resumed=count, stops=StopConditions(32 - count))
        assert (await answer(engine, resumed)).ids == expected[count:]
    choices = [replace(request, choice=number) for number in range(3)]
    alone = [(await answer(engine, choice)).ids for choice in choices]
    assert all(ids.index(0) == 24 for ids in alone)
    await engine.stop()

    crowded = make_engine(grammars=grammars, num_blocks=(len(PROMPT) + 32) // 4 + 2)
    await crowded.start()
    lengths = record_preemptions(crowded, monkeypatch)
    replies = await run_all(*(answer(crowded, choice) for choice in choices))
    assert any(0 < length < 24 for length in lengths), lengths
    assert [reply.ids for reply in replies] == alone
    await crowded.stop()

    pair = NativePair(make_engine(grammars=grammars), make_engine(grammars=grammars))
    await pair.start()
    assert (await answer(pair.d, replace(request, prefill="p"))).ids == expected
    for worker in (pair.p, pair.d):
        await worker.stop()


async def test_an_answer_that_was_complete_before_the_break_ends_at_once(
    make_engine: Any, make_request: Any, grammars: GrammarCompiler, tokenizer: Any
) -> None:
    engine = make_engine(grammars=grammars)
    await engine.start()
    ids = [*memoryview(tokenizer.encode("yes")).cast("I")]
    form = StructuredOutput("choice", '["yes", "no"]')
    reply = await answer(
        engine, make_request([*PROMPT, *ids], 5, structured=form, resumed=len(ids))
    )
    assert reply.ids == []
    assert reply.end is not None
    assert reply.end.reason == "stop"
    await engine.stop()


async def test_a_matcher_that_fails_ends_its_own_answer_only(
    make_engine: Any,
    make_request: Any,
    grammars: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(grammars=grammars)
    await engine.start()
    free = make_request(PROMPT, 20, sampling=SEEDED)
    expected = (await answer(engine, free)).ids

    def fail(matcher: GrammarMatcher) -> None:
        matcher.fail("too many expressions")

    monkeypatch.setattr(GrammarMatcher, "mask", fail)
    bad = make_request(PROMPT, 20, structured=FORM)
    results = await run_all(answer(engine, free), _error_of(engine, bad))
    assert results[0].ids == expected
    assert "too many expressions" in str(results[1])
    await engine.stop()


async def _error_of(engine: BatchedEngine, request: Any) -> Any:
    with pytest.raises(SchemaTooComplex) as caught:
        await answer(engine, request)
    return caught.value


async def test_an_engine_without_a_tokenizer_refuses_forms(
    make_engine: Any, make_request: Any
) -> None:
    engine = make_engine()
    info = await engine.start()
    assert "structured" not in info.features
    with pytest.raises(Unsupported):
        await answer(engine, make_request(PROMPT, 5, structured=FORM))
    await engine.stop()


@pytest.mark.parametrize("count", [1, 5, 400, 4000, 20_000])
def test_few_and_many_allowed_tokens_have_the_distribution_of_a_filled_row(count: int) -> None:
    rng = np.random.default_rng(count)
    row = rng.normal(0, 3, 32_000).astype(np.float32)
    bits = np.zeros(32_000, np.uint8)
    bits[rng.choice(32_000, count, replace=False)] = 1
    mask = np.packbits(bits, bitorder="little").tobytes()
    filled = np.where(bits == 1, row, np.float32(-1e30))
    for chance in (0.0, 0.3, 0.9):
        token = sample_masked(row.copy(), mask, SEEDED, chance)
        assert bits[token]
        assert token == sample_filtered(filled.copy(), SEEDED, chance)
    assert sample_masked(row.copy(), mask, SEEDED, None) == int(filled.argmax())


def test_without_an_allowed_token_there_is_none() -> None:
    row = np.ones(64, np.float32)
    assert sample_masked(row, bytes(8), SEEDED, 0.5) == -1
    assert sample_masked(row, bytes(4), SEEDED, None) == -1
