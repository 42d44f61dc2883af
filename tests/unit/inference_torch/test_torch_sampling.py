"""Sampling on the device takes the tokens that sampling in NumPy takes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dynamo.core.codec import pack_ids
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.native import sampling as native
from dynamo.inference.sequence import EngineSequence, TokenContent

torch = pytest.importorskip("torch", reason="make test-torch installs PyTorch")

VOCABULARY = 1000
EMPTY, FEW, MANY = bytes(125), bytes([0, 3, 128] + [0] * 120), bytes([255, 7] * 55)


class FixedGrammar:
    """Allows the tokens of one mask; the mask may be shorter than the vocabulary."""

    def __init__(self, mask: bytes | None) -> None:
        self._mask = mask
        self.failure = ""

    def mask(self) -> bytes | None:
        return self._mask

    def fail(self, reason: str) -> None:
        self.failure = reason


def make_sequence(chooser: random.Random, row: int) -> EngineSequence:
    """Return a sequence with random parameters, of which every sixth row has no request's own."""
    choose = chooser.choice
    sampling = SamplingParams(
        temperature=choose((0.0, 0.3, 1.0, 1.7)),
        top_p=choose((1.0, 0.95, 0.5, 0.0)),
        top_k=choose((0, 0, 1, 7, 400, 5000)),
        min_p=choose((0.0, 0.0, 0.02, 0.5)),
        seed=chooser.randrange(-(1 << 62), 1 << 62),
        presence_penalty=choose((0.0, 0.0, 1.5)),
        frequency_penalty=choose((0.0, 0.0, 0.7)),
        repetition_penalty=choose((1.0, 1.0, 1.3)),
        logit_bias=choose(({}, {}, {5: 9.0, 2000: 3.0}, {7: -50.0})),
    )
    prompt = [chooser.randrange(VOCABULARY) for _ in range(30)]
    request = GenerateRequest(
        "r", "m", pack_ids(prompt), sampling, StopConditions(max_tokens=20, min_tokens=2),
        choice=row % 3, resumed=row % 4, top_logprobs=choose((None, 0, 3, 20)),
    )  # fmt: skip
    content = TokenContent(request.token_ids, 16)
    sequence = EngineSequence(content, len(prompt), 20, request=request)
    sequence.stop_ids = frozenset({3, 4})
    sequence.min_length += choose((0, 2))
    grammar: Any = FixedGrammar(choose((None, FEW, MANY)))
    sequence.grammar = choose((None, None, grammar))
    return sequence


@pytest.mark.parametrize("seed", range(3))
def test_tokens_and_logprobs_are_those_of_numpy(seed: int) -> None:
    from dynamo.inference.torch.sampling import sample

    chooser = random.Random(seed)
    sequences = [make_sequence(chooser, row) for row in range(200)]
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 3, (200, VOCABULARY)).astype(np.float32)
    logits[::7] = np.round(logits[::7])  # many ties
    tokens, logprobs = sample(torch.from_numpy(logits.copy()), sequences)
    with np.errstate(over="ignore"):
        expected_tokens, expected_logprobs = native.sample(logits, sequences)
    assert tokens == expected_tokens
    assert logprobs is not None
    assert expected_logprobs is not None
    for mine, other in zip(logprobs, expected_logprobs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.token == other.token
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
            for value, theirs in zip(mine.top, other.top, strict=True):
                assert value[1] == pytest.approx(theirs[1], abs=1e-5)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_form_without_an_allowed_token_fails_alone() -> None:
    from dynamo.inference.torch.sampling import sample

    sequences = [make_sequence(random.Random(row), row) for row in range(2)]
    grammars: list[Any] = [FixedGrammar(EMPTY), FixedGrammar(FEW)]
    for sequence, grammar in zip(sequences, grammars, strict=True):
        sequence.grammar = grammar
    tokens, _ = sample(torch.randn(2, VOCABULARY), sequences)
    assert grammars[0].failure
    assert not grammars[1].failure
    assert FEW[tokens[1] >> 3] >> (tokens[1] & 7) & 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    from dynamo.inference.torch.sampling import sample

    logits = torch.zeros(1, VOCABULARY)
    logits[0, 30] = value
    sequence = make_sequence(random.Random(1), 0)
    sequence.grammar = None
    with pytest.raises(ArithmeticError, match="not finite"):
        sample(logits, [sequence])


def test_a_step_without_samples_has_no_tokens() -> None:
    from dynamo.inference.torch.sampling import sample

    assert sample(torch.zeros(0, VOCABULARY), []) == ([], None)
