"""Sampling of the next token from logits."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dynamo.core.codec import pack_ids
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.native.sampling import (
    apply_penalties,
    log_softmax,
    sample,
    sample_filtered,
    sample_row,
    top_ids,
    uniform,
)
from dynamo.inference.sequence import EngineSequence, TokenContent

rng = np.random.default_rng(1)
UNFILTERED = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)


def random_row(size: int = 50_000, spread: float = 2.0) -> Any:
    return rng.normal(0, spread, size).astype(np.float32)


def reference_distribution(row: Any, sampling: SamplingParams) -> Any:
    """Return ids, best first, and their filtered probabilities. Everything is sorted."""
    order = np.lexsort((np.arange(len(row)), -row))
    if sampling.top_p >= 1 and not 0 < sampling.top_k < len(row) and not sampling.min_p:
        order = np.arange(len(row))
    weights = np.exp((row[order].astype(np.float64) - float(row.max())) / sampling.temperature)
    count = int((weights >= sampling.min_p).sum())
    if sampling.top_k:
        count = min(count, sampling.top_k)
    weights = weights[:count] / weights[:count].sum()
    if sampling.top_p < 1:
        count = int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1
        weights = weights[:count] / weights[:count].sum()
    return order[:count], weights


@pytest.mark.parametrize(
    "sampling",
    [
        UNFILTERED,
        SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
        SamplingParams(temperature=2.0, top_p=0.95, top_k=0),
        SamplingParams(temperature=1.5, top_p=1.0, top_k=0, min_p=0.01),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=500),
        SamplingParams(temperature=1.0, top_p=0.0, top_k=0),
        SamplingParams(temperature=0.01, top_p=0.5, top_k=3, min_p=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [50_000, 300, 2])
def test_sampling_inverts_the_filtered_distribution(sampling: SamplingParams, size: int) -> None:
    row = random_row(size)
    ids, weights = reference_distribution(row, sampling)
    borders = np.cumsum(weights)
    for chance in (0.0, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53):
        index = min(int(np.searchsorted(borders, chance, side="right")), len(ids) - 1)
        near = np.abs(borders - chance).min() < 1e-4
        if not near:
            assert sample_filtered(row, sampling, chance) == ids[index]


def test_equal_logits_are_ordered_by_id() -> None:
    row = np.zeros(5_000, np.float32)
    assert top_ids(row, 3).tolist() == [0, 1, 2]
    assert sample_filtered(row, SamplingParams(temperature=1, top_p=1, top_k=4), 0.6) == 2


@pytest.mark.parametrize("count", [1, 5, 50, 800, 2_000])
def test_top_ids_equal_a_full_sort(count: int) -> None:
    row = random_row(33_333)
    assert top_ids(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()


def test_unfiltered_shares_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    tokens = [
        sample_filtered(row, UNFILTERED, uniform(1, 0, position)) for position in range(4_000)
    ]
    assert np.bincount(tokens, minlength=3) / 4_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def reference_penalties(
    row: Any, sampling: SamplingParams, prompt: list[int], output: list[int]
) -> Any:
    """Apply penalties to one token at a time.

    Presence and frequency penalties are OpenAI's, the repetition penalty is that of the CTRL paper.
    """
    logits = [float(logit) + sampling.logit_bias.get(token, 0) for token, logit in enumerate(row)]
    for token in {*prompt, *output}:
        scale = sampling.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token in output:
        logits[token] -= sampling.frequency_penalty
    for token in {*output}:
        logits[token] -= sampling.presence_penalty
    return np.array(logits)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, top_p=0.8, top_k=12, seed=3),
        SamplingParams(temperature=1.3, top_p=1.0, top_k=0, min_p=0.1, seed=-4),
        SamplingParams(
            temperature=1.0,
            top_p=0.95,
            top_k=0,
            seed=5,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.3,
            logit_bias={2: 1.5, 30: -3.0},
        ),
    ],
    ids=str,
)
def test_many_samples_have_the_reference_s_shares(sampling: SamplingParams) -> None:
    row = np.random.default_rng(9).normal(0, 1, 40).astype(np.float32)
    prompt, output, samples = [1, 2, 3], [2, 2, 7], 4_000
    ids, weights = reference_distribution(
        reference_penalties(row, sampling, prompt, output), sampling
    )
    sequence = make_sequence(prompt + output, len(prompt), sampling)
    counts = np.zeros(len(row))
    for position in range(samples):
        sequence.length = len(prompt) + position
        counts[sample_row(row.copy(), sequence)] += 1
    shares = counts / samples
    assert counts[ids].sum() == samples, "a filtered token was sampled"
    assert (np.abs(shares[ids] - weights) < 4 * np.sqrt(weights / samples) + 1e-3).all()


def test_uniform_depends_only_on_seed_choice_and_position() -> None:
    keys = [(s, c, p) for s in (0, -1, 1 << 63, 1 << 64) for c in (0, 1) for p in (0, 1)]
    numbers = [uniform(*key) for key in keys]
    assert numbers == [uniform(*key) for key in keys]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 12  # 2**64 is 0 again


def make_sequence(
    ids: list[int], prompt: int, sampling: SamplingParams, resumed: int = 0
) -> EngineSequence:
    request = GenerateRequest("r", "m", pack_ids(ids), sampling, StopConditions(), resumed=resumed)
    sequence = EngineSequence(TokenContent(pack_ids(ids), 16), prompt, 9, request=request)
    sequence.length = len(ids)
    return sequence


def test_penalties_count_tokens_of_earlier_attempts() -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    row = np.zeros(6, np.float32)
    apply_penalties(row, sampling, make_sequence([0, 1, 2, 2, 3], 3, sampling))
    assert row.tolist() == [0, 0, -0.75, -0.75, 0, 0]
    row = np.zeros(6, np.float32)
    apply_penalties(row, sampling, make_sequence([0, 1, 2, 2, 3], 3, sampling, resumed=1))
    assert row.tolist() == [0, 0, -1.0, -0.75, 0, 0]


def test_the_repetition_penalty_counts_the_prompt() -> None:
    sampling = SamplingParams(repetition_penalty=2.0)
    row = np.array([1, -1, 3, 5], np.float32)
    apply_penalties(row, sampling, make_sequence([0, 1, 3], 2, sampling))
    assert row.tolist() == [0.5, -2, 3, 2.5]


def test_bias_is_added_and_unknown_ids_are_ignored() -> None:
    sampling = SamplingParams(logit_bias={1: 2.5, 99: 1.0})
    row = np.zeros(3, np.float32)
    apply_penalties(row, sampling, make_sequence([0], 1, sampling))
    assert row.tolist() == [0, 2.5, 0]


def test_log_softmax_survives_large_logits() -> None:
    logprobs = log_softmax(np.array([1000.0, 999.0], np.float32))
    assert logprobs == pytest.approx([-0.31326, -1.31326], abs=1e-4)


EVERY_FILTER = [
    SamplingParams(temperature=0),
    UNFILTERED,
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=0),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=5_000),
]


@pytest.mark.parametrize("sampling", EVERY_FILTER, ids=str)
@pytest.mark.parametrize("damage", [[np.nan], [np.inf], [np.nan] * 50_000, [-np.inf] * 50_000])
def test_logits_that_are_not_finite_are_refused(
    sampling: SamplingParams, damage: list[float]
) -> None:
    row = random_row()
    row[-len(damage) :] = damage
    with pytest.raises(ArithmeticError, match="not finite"):
        sample(row[None], [make_sequence([0, 1], 1, sampling)])


@pytest.mark.parametrize("sampling", EVERY_FILTER, ids=str)
def test_a_request_cannot_make_its_row_unusable(sampling: SamplingParams) -> None:
    """Ban every token, or use a penalty at the limit of float32."""
    sequence = make_sequence([0, 1, 2], 1, sampling)
    sequence.stop_ids, sequence.min_length = frozenset(range(2_000)), 9
    assert 0 <= sample_row(random_row(1_000), sequence) < 1_000
    for penalty in (1e-300, 1e-40, 100.0):
        extreme = msgspec.structs.replace(sampling, repetition_penalty=penalty)
        with np.errstate(over="ignore"):
            assert 0 <= sample_row(random_row(1_000), make_sequence([0, 1, 2], 1, extreme)) < 1_000


@pytest.mark.parametrize("temperature", [1e-6, 1e-46, 1e-320])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = random_row()
    sampling = SamplingParams(temperature=temperature, top_p=1.0, top_k=0)
    assert sample_row(row, make_sequence([0, 1], 1, sampling)) == row.argmax()
