"""The mock's modelled step times and its pacing."""

from __future__ import annotations

import json

import pytest
from tests.unit.inference.conftest import RecordingReply

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.timing.model import DYNAMO_TIMING, parse_timing
from dynamo.core.values import EngineInfo, GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.model_runner import StepPlan
from dynamo.inference.sequence import SequenceFactory
from dynamo.inference.step_scheduler import StepScheduler


def test_the_default_is_dynamo_s_polynomials():
    prefill = StepPlan((), new_tokens=1000)
    assert DYNAMO_TIMING.step_ms(prefill, 10_000) == pytest.approx(0.4209989 + 15.18344 + 16.50142)
    decode = StepPlan((), decode_seqs=2, decode_context=5_000)
    assert DYNAMO_TIMING.step_ms(decode, 10_000) == pytest.approx(-25.74 / 4 + 54.01 / 2 + 5.74)
    both = StepPlan((), new_tokens=1000, decode_seqs=2, decode_context=5_000)
    apart = DYNAMO_TIMING.step_ms(prefill, 10_000) + DYNAMO_TIMING.step_ms(decode, 10_000)
    assert DYNAMO_TIMING.step_ms(both, 10_000) == pytest.approx(apart)
    assert DYNAMO_TIMING.step_ms(StepPlan(()), 10_000) == 1.0


def test_constant_and_file_timings(tmp_path):
    plan = StepPlan((None, None, None), new_tokens=100, decode_seqs=2, decode_context=50)
    assert parse_timing("constant:0.5,3").step_ms(plan, 1) == 53
    file = tmp_path / "linear.json"
    file.write_text(json.dumps({"type": "linear", "c0": 1, "c1": 0.1, "c2": 2, "c3": 0.5}))
    assert parse_timing(str(file)).step_ms(plan, 1) == pytest.approx(1 + 10 + 6 + 25)
    file.write_text(json.dumps({"type": "linear", "c0": 1, "c1": 0.1, "c4": 0.25}))
    plan = StepPlan((None,), new_tokens=100, attention=100 * (300 + 50.0))
    assert parse_timing(str(file)).step_ms(plan, 1) == pytest.approx(1 + 10 + 0.25 * 35_000)
    plan = StepPlan((None, None, None), new_tokens=100, decode_seqs=2, decode_context=50)
    file.write_text(json.dumps({"type": "polynomials", "prefill": [1, 2], "decode": [4]}))
    assert parse_timing(str(file)).step_ms(plan, 100) == 205


@pytest.mark.parametrize(
    "text",
    [
        "constant:1",
        "constant:a,b",
        "constant:-1,2",
        "constant:nan,5",
        "constant:1,inf",
        "/no/such/file",
        "/tmp",
    ],
)
def test_a_wrong_timing_is_refused(text):
    with pytest.raises(ConfigError):
        parse_timing(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"type": "linear", "c0": 1, "c1": 0.1, "c5": 2}', "c5"),
        ('{"type": "linear", "c0": -1, "c1": 0.1}', "c0"),
        ('{"type": "polynomials", "prefill": [1], "decode": [1], "floor_ms": -2}', "floor_ms"),
        ('{"c0": 1, "c1": 0.1}', "type"),
        ("", "truncated"),
        ("\xff", "file.json"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path, text, reason):
    file = tmp_path / "file.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=reason):
        parse_timing(str(file))


async def test_steps_take_the_modelled_time(make_engine, make_request, clock):
    engine = make_engine(timing="constant:1,10")
    await engine.start()
    await engine.generate(make_request(range(50), max_tokens=5), Context("r"), RecordingReply())
    assert clock.time == pytest.approx(100 + 0.050 + 5 * 0.010)
    clock.time += 7  # idle
    await engine.generate(make_request([900], max_tokens=1), Context("r"), RecordingReply())
    assert clock.time == pytest.approx(107 + 0.100 + 0.011)
    await engine.stop()


async def test_short_steps_set_no_timer_but_accumulate(make_engine, make_request, clock):
    engine = make_engine(timing="constant:0,10", speedup_ratio=50)
    await engine.start()
    await engine.generate(make_request(range(50), max_tokens=100), Context("r"), RecordingReply())
    assert clock.sleeps == 20
    assert clock.time == pytest.approx(100 + 100 * 0.0002)
    await engine.stop()


def test_the_attention_of_a_prompt_does_not_depend_on_its_chunks():
    def attention(tokens_a_step: int) -> float:
        limits = EngineInfo("mock", 16, 64, 1024, 8, tokens_a_step)
        scheduler = StepScheduler(BlockPool(64, 16), limits)
        scheduler.add(
            SequenceFactory(16, 0, frozenset(), None, has_tiers=False).make(request_of(300))
        )
        total = 0.0
        while plan := scheduler.schedule():
            total += plan.attention
            if plan.decode_seqs:
                break
            scheduler.complete(plan, [1] * sum(chunk.samples for chunk in plan.chunks))
        return total

    assert attention(1000) == attention(70) == 300 * 150


def request_of(tokens: int) -> GenerateRequest:
    return GenerateRequest("r", "m", bytes(4 * tokens), SamplingParams(), StopConditions(4))
