"""Learning the time of steps."""

from __future__ import annotations

from random import Random

import pytest

from dynamo.core.timing.learner import (
    INITIAL_TOKEN_S,
    MIN_STEPS,
    REFIT_STEPS,
    SKIPPED_STEPS,
    WINDOW,
    TimingLearner,
)
from dynamo.core.timing.model import Counts, Timing

TRUE = Timing(c0=12.0, c1=0.05, c2=0.3, c3=4e-4, c4=2e-6)


def step(rng: Random, *, prompt: bool) -> Counts:
    seqs = rng.randint(1, 60)
    new = rng.randint(1, 4000) if prompt else 0
    before = rng.randint(0, 30_000)
    return Counts(new, seqs, seqs - prompt, seqs * rng.randint(100, 3000), new * (before + new / 2))


def feed(
    learner: TimingLearner, timing: Timing, steps: int, rng: Random, noise: float = 0.0
) -> None:
    for number in range(steps):
        counts = step(rng, prompt=number % 3 == 0)
        seconds = timing.step_ms(counts, 1) * 1e-3
        learner.observe(counts, seconds * (1 + noise * rng.uniform(-1, 1)))


def predicted_errors(learned: Timing | None, timing: Timing) -> list[float]:
    assert learned is not None
    rng = Random(7)
    steps = [step(rng, prompt=number % 2 == 0) for number in range(100)]
    return [learned.step_ms(each, 1) / timing.step_ms(each, 1) - 1 for each in steps]


def test_steps_are_predicted_in_spite_of_noise_and_pauses() -> None:
    learner, rng = TimingLearner(), Random(1)
    feed(learner, TRUE, SKIPPED_STEPS + 400, rng, noise=0.1)
    assert learner.timing is not None
    for _ in range(20):
        learner.observe(step(rng, prompt=False), 5.0)
    feed(learner, TRUE, REFIT_STEPS, rng, noise=0.1)
    assert max(map(abs, predicted_errors(learner.timing, TRUE))) < 0.15


def test_the_first_steps_do_not_count() -> None:
    learner, rng = TimingLearner(), Random(2)
    for _ in range(SKIPPED_STEPS):
        learner.observe(step(rng, prompt=True), 60.0)
    feed(learner, TRUE, 300, rng)
    learner.restart()
    for _ in range(SKIPPED_STEPS):
        learner.observe(step(rng, prompt=True), 60.0)
    assert max(map(abs, predicted_errors(learner.timing, TRUE))) < 0.02


def test_recent_steps_count_and_memory_is_bounded() -> None:
    learner, rng = TimingLearner(), Random(3)
    feed(learner, TRUE, 1_000, rng)
    assert learner.timing is not None
    slower = Timing(*(3 * value for value in (12.0, 0.05, 0.3, 4e-4, 2e-6)))
    for _ in range(4):
        feed(learner, slower, max(REFIT_STEPS, 3 * WINDOW), rng)
        assert learner.timing is not None
    assert max(map(abs, predicted_errors(learner.timing, slower))) < 0.05
    assert len(learner._prompts) == len(learner._decodes) == WINDOW


def test_coefficients_are_not_negative_and_those_that_no_step_shows_stay() -> None:
    learner, rng = TimingLearner(), Random(4)
    feed(learner, TRUE, 600, rng)
    first = learner.timing
    assert first is not None
    counts = Counts(0, 4, 4, 1000, 0.0)
    for _ in range(10):
        for _ in range(REFIT_STEPS):
            learner.observe(counts, TRUE.step_ms(counts, 1) * 1e-3)
        assert min(learner.coefficients) >= 0
    assert learner.timing is not None
    assert learner.timing.c1 == pytest.approx(first.c1, rel=0.3)


def test_nothing_is_told_before_there_are_enough_steps() -> None:
    learner, rng = TimingLearner(), Random(5)
    feed(learner, TRUE, SKIPPED_STEPS + MIN_STEPS - 1, rng)
    assert learner.coefficients == ()
    feed(learner, TRUE, 1, rng)
    assert len(learner.coefficients) == 5


def test_spells_of_slower_and_faster_steps_are_averaged() -> None:
    learner, rng = TimingLearner(), Random(6)
    for number in range(12):
        share = 0.8 if number % 2 else 1.2
        spell = Timing(*(share * value for value in (12.0, 0.05, 0.3, 4e-4, 2e-6)))
        feed(learner, spell, REFIT_STEPS, rng)
        assert learner.timing is not None
    assert max(map(abs, predicted_errors(learner.timing, TRUE))) < 0.1


def test_a_prompt_token_takes_what_steps_take_longer_for_it() -> None:
    learner, rng = TimingLearner(), Random(8)
    assert learner.token_s == INITIAL_TOKEN_S
    for number in range(400):
        new = rng.randint(500, 4_000) if number % 2 else 0
        counts = Counts(new, 8, 8, 8_000, new * new / 2)
        extra_ms = 20 + 0.05 * new if new else 0.0  # more than its tokens, as in many engines
        learner.observe(counts, (10 + extra_ms) * 1e-3)
    assert learner.token_s == pytest.approx(0.05e-3 + 0.02 / 2_250, rel=0.1)


def test_a_worker_that_only_computes_prompts_of_one_length_learns_their_time() -> None:
    learner = TimingLearner()
    for _ in range(100):
        learner.observe(Counts(2_000, 1, 0, 0, 2e6), 0.1)
    assert learner.token_s == pytest.approx(5e-5, rel=0.1)
