"""RequestDefaults: request over configuration over model over built-in defaults."""

from random import Random
from typing import Any

import pytest

from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import SamplingOverrides, TextOptions
from dynamo.core.values import SamplingParams
from dynamo.scheduling.processor.request_defaults import RequestDefaults


def defaults(
    configured: SamplingSettings | None = None,
    generation: dict[str, Any] | None = None,
    context_tokens: int = 2000,
) -> RequestDefaults:
    return RequestDefaults(
        configured or SamplingSettings(), generation or {}, context_tokens, Random(1)
    )


def test_the_built_in_defaults() -> None:
    resolved = defaults().resolve_sampling(SamplingOverrides())
    assert resolved == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=50, seed=resolved.seed, random_seed=True
    )
    assert defaults().resolve_max_tokens(TextOptions(), 10) == 1990


def test_each_layer_overrides_the_one_below() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 99}
    configured = SamplingSettings(temperature=0.0, max_tokens=77)
    model = defaults(generation=generation)
    both = defaults(configured, generation)
    resolved = both.resolve_sampling(SamplingOverrides(top_k=0, seed=5))
    assert resolved == SamplingParams(
        temperature=0.0, top_p=0.9, top_k=0, repetition_penalty=1.1, seed=5
    )
    assert model.resolve_sampling(SamplingOverrides()).temperature == 0.6
    assert model.resolve_max_tokens(TextOptions(), 10) == 99
    assert both.resolve_max_tokens(TextOptions(), 10) == 77
    assert both.resolve_max_tokens(TextOptions(max_tokens=55), 10) == 55


def test_what_nobody_names_is_the_engines_before_the_built_in_numbers() -> None:
    engine = {"temperature": 0.8, "top_p": 1.0, "top_k": 0.0, "min_p": 0.05, "max_tokens": 88.0}
    configured = SamplingSettings(top_p=0.5)
    generation = {"temperature": 0.6, "max_new_tokens": 99}
    resolved = RequestDefaults(configured, generation, 2000, Random(1), engine)
    assert resolved.sampling == SamplingParams(temperature=0.8, top_p=0.5, top_k=0, min_p=0.05)
    assert type(resolved.sampling.top_k) is int
    assert resolved.resolve_max_tokens(TextOptions(), 10) == 88


def test_penalties_of_the_model_hold() -> None:
    generation = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    sampling = defaults(generation=generation).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5)


def test_a_negative_top_k_of_the_model_means_no_limit() -> None:
    assert defaults(generation={"top_k": -1}).resolve_sampling(SamplingOverrides()).top_k == 0


def test_seeds_are_random_and_replayable() -> None:
    first, second = defaults(), defaults()
    seeds = [first.resolve_sampling(SamplingOverrides()).seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [second.resolve_sampling(SamplingOverrides()).seed for _ in range(3)]
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("overrides", "random"),
    [
        (SamplingOverrides(), True),
        (SamplingOverrides(top_k=0), True),
        (SamplingOverrides(seed=0), False),
    ],
)
def test_a_seed_that_no_client_asked_for_is_marked(
    overrides: SamplingOverrides, random: bool
) -> None:
    assert defaults().resolve_sampling(overrides).random_seed is random


def test_max_tokens_are_limited_by_the_context() -> None:
    assert defaults().resolve_max_tokens(TextOptions(), 1990) == 10
    assert defaults().resolve_max_tokens(TextOptions(max_tokens=10), 1990) == 10
    assert defaults().resolve_max_tokens(TextOptions(max_tokens=128_000), 1990) == 10
    assert defaults().resolve_max_tokens(TextOptions(max_tokens=99, min_tokens=99), 1990) == 10
    assert defaults().resolve_max_tokens(TextOptions(max_tokens=0), 2000) == 0


@pytest.mark.parametrize(
    ("options", "prompt", "kind", "param"),
    [
        (TextOptions(), 2000, ContextLengthExceeded, "prompt"),
        (TextOptions(max_tokens=0), 2001, ContextLengthExceeded, "prompt"),
        (TextOptions(), 0, InvalidRequest, "prompt"),
        (TextOptions(max_tokens=5, min_tokens=6), 10, InvalidRequest, "min_tokens"),
        (TextOptions(min_tokens=11), 1990, InvalidRequest, "min_tokens"),
    ],
)
def test_a_request_beyond_the_context_is_refused(
    options: TextOptions, prompt: int, kind: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(kind) as refused:
        defaults().resolve_max_tokens(options, prompt)
    assert refused.value.param == param
