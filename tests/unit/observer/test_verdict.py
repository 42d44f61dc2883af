"""The verdict names the cause of a request that took longer, and none for the others."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.observer.stories import make_attempt, make_story

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Load
from dynamo.operations.observer.surroundings import Surroundings, TypicalTimes
from dynamo.operations.observer.verdict import RequestVerdict, judge
from dynamo.telemetry.story import AttemptFacts, Candidate, EndedStory

USUAL = WorkerTimes(
    queue_s=0.0, ahead_requests=0, ahead_tokens=0, kv_s=0.0, prefill_s=0.048, decode_s=0.1,
    gap_s=0.01, preemptions=0, recomputed_tokens=0,
)  # fmt: skip


def late_attempt(late_s: float, times: dict[str, Any], **fields: Any) -> AttemptFacts:
    """Return an attempt whose first token was late by `late_s`."""
    late_us = int(late_s * 1e6)
    return make_attempt(
        first_us=51_000 + late_us,
        ended_us=151_000 + late_us,
        times=replace(USUAL, **times),
        **fields,
    )


def verdict_on(story: EndedStory, known: Surroundings | None = None) -> RequestVerdict:
    typical = TypicalTimes()
    for _ in range(20):
        typical.add(make_story())
    return judge(story, "frontend-1", typical, known or Surroundings())


def late_story(attempt: AttemptFacts, **fields: Any) -> EndedStory:
    return make_story(attempt, ended_us=attempt.ended_us + 1_000, **fields)


def test_a_request_like_others_has_no_cause() -> None:
    verdict = verdict_on(make_story())
    assert (verdict.causes, verdict.text) == ((), "nothing took longer than usual: 0.152 s")


def test_the_first_requests_of_a_model_are_not_blamed_for_computing() -> None:
    long_one = make_attempt(first_us=9_000_000, ended_us=30_000_000, times=replace(
        USUAL, prefill_s=8.9, decode_s=21.0, gap_s=0.2
    ))  # fmt: skip
    story = make_story(long_one, ended_us=30_001_000, gap_us=200_000)
    verdict = judge(story, "frontend-1", TypicalTimes(), Surroundings())
    assert (verdict.causes, "too few requests" in verdict.text) == ((), True)

    queued = make_attempt(first_us=2_051_000, ended_us=2_151_000, times=replace(
        USUAL, queue_s=2.0, ahead_requests=9, ahead_tokens=400
    ))  # fmt: skip
    story = make_story(queued, ended_us=2_152_000)
    assert judge(story, "frontend-1", TypicalTimes(), Surroundings()).cause == "overload"
    paused = make_story(ended_us=5_152_000, gap_us=5_000_000)
    paused.attempts[0].ended_us = 5_151_000
    paused.attempts[0].times = replace(USUAL, decode_s=5.1)
    cause = judge(paused, "frontend-1", TypicalTimes(), Surroundings()).cause
    assert cause == "unexplained: decode"


@pytest.mark.parametrize(
    ("requests", "tokens", "cause"),
    [(1, 31_000, "long prompt ahead"), (40, 3_000, "overload")],
)
def test_a_queue_at_a_worker_names_what_was_ahead(requests: int, tokens: int, cause: str) -> None:
    longest = tokens if cause.startswith("long") else 400
    times = {"queue_s": 1.9, "ahead_requests": requests, "ahead_tokens": tokens}
    times["ahead_longest"] = longest
    costs = [Candidate("w1", 4, 300.0, {}), Candidate("w3", 0, 400.0, {})]
    attempt = late_attempt(1.9, times, costs=costs, predicted_us=300_000)
    verdict = verdict_on(late_story(attempt))
    assert (verdict.cause, verdict.causes[0].worker) == (cause, "w1")
    assert verdict.text.startswith("1.9 of 2.1 s waited at w1 behind ")
    assert verdict.text.endswith("; w3 was predicted to cost 0.4 s and held none of the prompt")


@pytest.mark.parametrize(("source", "cause"), [("peer", "slow transfer"), ("disk", "slow tier")])
def test_a_wait_for_kv_names_its_source(source: str, cause: str) -> None:
    attempt = late_attempt(0.8, {"kv_s": 0.8, "kv_from": source}, prefill_worker="")
    assert verdict_on(late_story(attempt)).cause == cause


@pytest.mark.parametrize(
    ("tokens", "text"), [(700, "w1, which computed 700 tokens again"), (None, "w1")]
)
def test_a_preemption_tells_what_was_computed_again(tokens: int | None, text: str) -> None:
    times = {"decode_s": 1.1, "preemptions": 2, "recomputed_tokens": tokens}
    attempt = late_attempt(0, times)
    attempt.ended_us += 1_000_000
    verdict = verdict_on(late_story(attempt))
    assert verdict.cause == "preemption"
    assert verdict.text.endswith(f"preempted 2 times at {text}")


def test_a_lost_worker_names_where_the_request_went_on() -> None:
    lost = make_attempt(
        worker="w2", ended_us=2_001_000, error="worker_failed", reason="the connection was lost",
        times=None, first_us=None,
    )  # fmt: skip
    again = make_attempt(
        choosing_us=2_051_000,
        placed_us=2_051_000,
        first_us=2_101_000,
        ended_us=2_201_000,
    )
    verdict = verdict_on(make_story(lost, again, ended_us=2_202_000))
    assert verdict.cause == "lost worker"
    assert verdict.causes[0].worker == "w2"
    assert "the connection was lost, and it went on at w1" in verdict.text
    frozen = replace(lost, reason="instance w2 does not answer")
    assert verdict_on(make_story(frozen, again, ended_us=2_202_000)).cause == "frozen worker"


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"prompt_blocks": 40, "overlap_blocks": 30, "view": "stale"}, "stale index"),
        ({"prompt_blocks": 40, "best_overlap_blocks": 35}, "at another worker"),
        ({"prompt_blocks": 40, "seen_blocks": 38}, "eviction"),
        ({}, "unexplained: prefill"),
    ],
)
def test_a_long_prefill_names_why_the_prompt_was_not_cached(
    facts: dict[str, Any], cause: str
) -> None:
    attempt = late_attempt(1.0, {"prefill_s": 1.048}, prompt_tokens=64, **facts)
    assert verdict_on(late_story(attempt)).cause == cause


@pytest.mark.parametrize(
    ("salt", "worker", "cause"),
    [(9, "w1", "wrong salt"), (0, "w2", "at another worker"), (0, "w1", "eviction")],
)
def test_the_same_prompt_was_seen_before(salt: int, worker: str, cause: str) -> None:
    known = Surroundings()
    known.marks["m", 7] = deque([(salt, worker, 900.0)])
    attempt = late_attempt(1.0, {"prefill_s": 1.048})
    assert verdict_on(late_story(attempt, prompt_mark=7), known).cause == cause


def test_a_loop_that_stood_still_and_a_client_that_did_not_read() -> None:
    known = Surroundings()
    known.pauses["frontend-1"] = deque([(1_001.0, 0.9)])
    story = make_story(ended_us=1_152_000)
    assert verdict_on(story, known).cause == "stalled loop"
    story.stalled_us = 950_000
    assert verdict_on(story).cause == "slow client"
    story.stalled_us = 0
    assert verdict_on(story).cause == "unexplained: deliver"


def test_a_wait_in_admission_names_what_for() -> None:
    attempt = make_attempt(
        choosing_us=901_000, placed_us=901_000, first_us=951_000, ended_us=1_051_000
    )
    for waited_for, cause in (("slot", "overload"), ("model", "model load"), ("", "unexplained")):
        story = late_story(attempt, waited_for=waited_for)
        assert verdict_on(story).cause.startswith(cause)


def test_two_causes_are_named_in_the_order_of_their_cost() -> None:
    times = {"queue_s": 0.5, "ahead_requests": 1, "ahead_tokens": 9_000, "ahead_longest": 9_000}
    attempt = late_attempt(1.3, {**times, "kv_s": 0.8, "kv_from": "disk"}, cached_tokens=60)
    verdict = verdict_on(late_story(attempt))
    assert [cause.name for cause in verdict.causes] == ["slow tier", "long prompt ahead"]


def test_a_prompt_that_is_computed_after_its_blocks_did_not_come_is_blamed_on_them() -> None:
    times = {"kv_s": 0.8, "kv_from": "disk", "prefill_s": 1.548}
    verdict = verdict_on(late_story(late_attempt(2.3, times, seen_blocks=4, prompt_blocks=4)))
    assert [cause.name for cause in verdict.causes] == ["slow tier", "slow tier"]
    assert "its tier disk had not sent the blocks after 0.8 s" in verdict.text
    tier = Candidate("w1", 40, 300.0, {}, tier_blocks={"shared": 40})
    attempt = late_attempt(
        1.0, {"prefill_s": 1.048}, prompt_blocks=40, overlap_blocks=40, costs=[tier]
    )
    assert verdict_on(late_story(attempt)).cause == "slow tier"
    tier = Candidate("w1", 40, 300.0, {})
    attempt = replace(attempt, costs=[tier])
    assert verdict_on(late_story(attempt)).cause == "stale index"
    assert verdict_on(late_story(replace(attempt, load=2))).cause == "eviction"
    assert verdict_on(late_story(replace(attempt, load=2, view="stale"))).cause == "stale index"


def test_a_request_that_failed_without_lateness_has_its_end() -> None:
    story = make_story(end="overloaded", ended_us=2_000)
    story.attempts = []
    assert verdict_on(story).cause == "ended: overloaded"


def test_a_long_prompt_at_the_worker_explains_waits_in_the_router_and_slow_decoding() -> None:
    known = Surroundings()
    long = late_attempt(1.0, {"prefill_s": 1.048}, prompt_tokens=5_000)
    known.add_prefills(make_story(long, wall_s=999.99))
    held = make_attempt(placed_us=901_000, waited_us=900_000, first_us=951_000, ended_us=1_051_000)
    verdict = verdict_on(late_story(held), known)
    assert verdict.cause == "long prompt ahead"
    assert "held by the router while w1 computed 5000 prompt tokens" in verdict.text
    slow = make_attempt(ended_us=1_051_000, times=replace(USUAL, decode_s=1.0))
    assert verdict_on(late_story(slow), known).cause == "long prompt ahead"
    assert verdict_on(late_story(slow)).cause == "unexplained: decode"
    assert verdict_on(late_story(held)).cause == "overload"


def test_a_quarter_of_an_hour_of_late_requests_is_not_usual() -> None:
    typical = TypicalTimes()
    for number in range(100):
        typical.add(make_story(wall_s=1_000.0 + number))
    late = late_attempt(1.9, {"queue_s": 1.9, "ahead_requests": 9, "ahead_tokens": 400})
    for number in range(9_000):
        typical.add(late_story(late, wall_s=2_000.0 + number / 10))
    assert judge(late_story(late), "frontend-1", typical, Surroundings()).cause == "overload"
    for number in range(300):
        typical.add(late_story(late, wall_s=3_000.0 + number * 60))
    assert judge(late_story(late), "frontend-1", typical, Surroundings()).cause == ""


def test_a_queue_is_shared_between_requests_that_moved_and_those_that_came() -> None:
    lost = make_attempt(worker="w2", error="worker_failed", reason="the connection broke")
    known = Surroundings()
    for _ in range(3):
        known.add_moves(make_story(lost, make_attempt(placed_us=200_000, first_us=900_000)))
    queued = late_attempt(1.0, {"queue_s": 1.0, "ahead_requests": 10, "ahead_tokens": 600})
    verdict = verdict_on(late_story(queued), known)
    assert [(cause.name, cause.us) for cause in verdict.causes] == [
        ("overload", 700_000), ("lost worker", 300_000),
    ]  # fmt: skip
    slot = make_attempt(
        choosing_us=901_000, placed_us=901_000, first_us=951_000, ended_us=1_051_000
    )
    story = late_story(slot, waited_for="slot", ahead=2)
    assert verdict_on(story, known).cause == "lost worker"


def test_a_prompt_of_which_the_index_has_lost_a_part_costs_all_that_was_seen_before() -> None:
    attempt = late_attempt(
        0.15, {"prefill_s": 0.2}, prompt_blocks=40, overlap_blocks=12, seen_blocks=40, view="stale"
    )
    verdict = verdict_on(late_story(attempt))
    assert [(cause.name, cause.us) for cause in verdict.causes] == [("stale index", 200_000)]


def test_a_new_prompt_is_a_cause_if_it_is_long_and_short_ones_wait_for_others() -> None:
    long = late_attempt(1.0, {"prefill_s": 1.048}, prompt_tokens=4_000)
    assert verdict_on(late_story(long)).cause == "new prompt"
    short = late_attempt(1.0, {"prefill_s": 1.048}, load=20)
    assert verdict_on(late_story(short)).cause == "overload"


def test_short_answers_do_not_tell_the_usual_pace() -> None:
    typical = TypicalTimes()
    for _ in range(20):
        typical.add(make_story())
        typical.add(make_story(make_attempt(ended_us=51_000), output_tokens=1, ended_us=52_000))
    assert typical.usual_us(make_story(), "decode") == pytest.approx(100_000)
    assert judge(make_story(), "frontend-1", typical, Surroundings()).cause == ""


def test_an_attempt_that_was_lost_with_a_plane_is_blamed_on_it() -> None:
    lost = make_attempt(
        first_us=None, ended_us=900_000, error="worker_failed", times=None,
        reason="the connection to the instance broke",
    )  # fmt: skip
    again = make_attempt(placed_us=901_000, first_us=951_000, ended_us=1_051_000)
    story = make_story(lost, again, ended_us=1_052_000)
    assert verdict_on(story).cause == "lost worker"
    known = Surroundings()
    known.planes.append((1_000.0, 1_001.0, "frontend-1", "NATS closed the connection"))
    assert verdict_on(story, known).cause == "lost worker", "it never answered again"
    known.add_answers(make_story(wall_s=1_050.0))
    verdict = verdict_on(story, known)
    assert verdict.cause == "plane away"
    assert "while a plane was away: NATS closed the connection" in verdict.text


def test_several_long_prompts_in_turn_explain_a_pause() -> None:
    slow = late_attempt(0.0, {"decode_s": 8.1})
    slow.ended_us = 8_151_000
    known = Surroundings()
    known.prefills["w1"] = deque(
        (1_000.0 + at, 1_000.0 + at, 1_000.9 + at, 3_000) for at in range(1, 8)
    )
    verdict = verdict_on(late_story(slow), known)
    assert verdict.cause == "long prompt ahead"
    assert "21k prompt tokens" in verdict.text


def test_a_plane_that_is_away_does_not_slow_what_a_worker_measures() -> None:
    known = Surroundings()
    known.planes.append((1_000.0, 1_010.0, "frontend-1", "NATS does not answer"))
    slow = make_attempt(ended_us=1_051_000, times=replace(USUAL, decode_s=1.0))
    assert verdict_on(late_story(slow), known).cause == "unexplained: decode"
    sent = late_attempt(1.0, {})
    assert verdict_on(late_story(sent), known).cause == "plane away"
    assert verdict_on(late_story(sent)).cause == "unexplained: send"


def test_what_a_request_waited_for_before_its_worker_was_lost_is_told() -> None:
    times = {"queue_s": 0.8, "ahead_requests": 9, "ahead_tokens": 400}
    lost = late_attempt(0.8, times, worker="w2", error="worker_failed", reason="it broke")
    again = make_attempt(placed_us=2_051_000, first_us=2_101_000, ended_us=2_201_000)
    story = make_story(lost, again, gap_us=1_150_000, ended_us=2_202_000)
    verdict = verdict_on(story)
    assert [cause.name for cause in verdict.causes] == ["lost worker", "overload", "lost worker"]
    assert "0.048 of 2.2 s computing at w1 again what w2 had computed" in verdict.text


def test_a_wait_for_kv_after_the_first_token_is_a_transfer() -> None:
    times = replace(USUAL, decode_s=0.8, kv_after_s=0.7, kv_from="peer")
    slow = make_attempt(ended_us=851_000, times=times, prefill_worker="p1")
    verdict = verdict_on(late_story(slow))
    assert verdict.text == "0.7 of 0.85 s waited at w1 for KV blocks of p1"


def test_a_lost_attempt_without_a_token_waited_as_long_as_predicted_for_what_was_ahead() -> None:
    lost = make_attempt(
        worker="w2", first_us=None, ended_us=1_501_000, error="worker_failed", times=None,
        reason="instance w2 does not answer", predicted_us=450_000, load=3,
    )  # fmt: skip
    again = make_attempt(placed_us=1_501_000, first_us=1_551_000, ended_us=1_651_000)
    story = make_story(lost, again, ended_us=1_652_000)
    verdict = verdict_on(story)
    assert [(cause.name, cause.us) for cause in verdict.causes[:2]] == [
        ("frozen worker", 1_100_000), ("overload", 400_000),
    ]  # fmt: skip
    assert "waited at w2 behind 3 requests" in verdict.text
    known = Surroundings()
    ahead = replace(lost, prompt_tokens=5_000, placed_us=0)
    known.add_prefills(make_story(ahead, make_attempt(placed_us=1_500_000), wall_s=999.9))
    assert verdict_on(story, known).causes[1].name == "long prompt ahead"


def test_a_pause_of_a_worker_comes_with_its_load() -> None:
    known = Surroundings()
    for _ in range(2):
        known.add_loads({"w1": Load(last_pause=(1_000.875, 0.75))}, 1_001.0)
    slow = make_attempt(ended_us=1_051_000, times=replace(USUAL, decode_s=1.0))
    verdict = verdict_on(late_story(slow), known)
    assert [(cause.name, cause.us) for cause in verdict.causes] == [("stalled loop", 750_000)]
    assert "the event loop of w1 stood still in stage decode" in verdict.text


def test_a_loss_ranks_with_the_wait_that_it_led_to() -> None:
    lost = make_attempt(worker="w2", ended_us=500_000, error="worker_failed", reason="it broke")
    times = replace(USUAL, queue_s=0.4, ahead_requests=9, ahead_tokens=400)
    again = make_attempt(placed_us=501_000, first_us=951_000, ended_us=1_051_000, times=times)
    story = make_story(lost, again, gap_us=300_000, ended_us=1_052_000)
    causes = [(cause.name, cause.us) for cause in verdict_on(story).causes]
    assert causes[:2] == [("lost worker", 300_000), ("overload", 400_000)]
    lost.first_us = None
    lost.placed_us = 401_000
    assert verdict_on(story).causes[0].name == "overload", "it would have waited at w2, too"
    lost.predicted_us = 50_000
    assert verdict_on(story).causes[0].name == "lost worker", "w2 was to answer at once"
