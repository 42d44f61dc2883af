"""The verdict on an answer whose steps were slow: its batch, requests that moved, and the cores."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace
from tests.unit.observer.stories import make_attempt, make_story
from tests.unit.observer.test_verdict import USUAL, late_attempt, late_story, verdict_on

from dynamo.core.values import Load
from dynamo.operations.observer.surroundings import MAX_WORKERS, Surroundings


def test_requests_that_lost_their_worker_explain_slow_ones_where_they_went() -> None:
    lost = make_attempt(worker="w2", error="worker_failed", reason="the connection broke")
    again = make_attempt(
        choosing_us=200_000, placed_us=200_000, first_us=300_000, ended_us=1_100_000
    )
    known = Surroundings()
    slow = make_attempt(ended_us=1_051_000, times=replace(USUAL, decode_s=1.0), load=3)
    known.add_moves(make_story(lost, replace(again, worker="w3")))
    for moves in range(2):
        assert verdict_on(late_story(slow), known).cause == "unexplained: decode", moves
        known.add_moves(make_story(lost, again))
    verdict = verdict_on(late_story(slow), known)
    assert (verdict.cause, verdict.causes[0].worker) == ("lost worker", "w2")
    assert "to which 2 other requests of w2 moved" in verdict.text


def test_an_answer_beside_many_more_requests_than_usual_is_overload() -> None:
    slow = make_attempt(ended_us=1_051_000, times=replace(USUAL, decode_s=1.0), load=5)
    verdict = verdict_on(late_story(slow))
    assert verdict.text == "0.9 of 1.1 s decoding at w1 beside 5 requests"
    assert verdict_on(late_story(replace(slow, load=3))).cause == "unexplained: decode"
    prompt = late_attempt(0.5, {"prefill_s": 0.54}, load=1)
    assert verdict_on(late_story(prompt)).text.endswith("prompt tokens at w1 beside 1 request")


def test_an_answer_in_a_larger_batch_is_overload_for_as_much_as_its_worker_has_learnt() -> None:
    known = Surroundings()
    times = replace(USUAL, decode_s=1.0, decode_beside=7.0)
    slow = make_attempt(ended_us=1_051_000, times=times, load=0, output_tokens=10)
    assert verdict_on(late_story(slow), known).cause == "overload", "so many are always a reason"
    known.add_loads({"w1": Load(timing=(2.0, 0.1, 20.0, 0.0, 0.0))}, 1_000.0)
    few = replace(slow, times=replace(times, decode_beside=3.0))
    for attempt, us in ((slow, 900_000), (few, 600_000)):
        verdict = verdict_on(late_story(attempt), known)
        assert [(cause.name, cause.us) for cause in verdict.causes] == [("overload", us)]
    known.add_loads({"w1": Load(timing=(2.0, 0.1, 0.0, 0.0, 0.0))}, 1_001.0)
    assert verdict_on(late_story(slow), known).cause == "unexplained: decode"
    known.add_loads({"w1": Load(timing=(2.0, 1.5, 0.0, 0.0, 0.0))}, 1_002.0)
    assert verdict_on(late_story(slow), known).cause == "overload", "many prompts cost something"


def test_requests_that_moved_explain_an_answer_for_as_long_as_they_were_beside_it() -> None:
    lost = make_attempt(worker="w2", error="worker_failed", reason="the connection broke")
    known = Surroundings()
    moved = make_attempt(placed_us=150_000, first_us=898_000, ended_us=2_000_000)
    for _ in range(8):
        known.add_moves(make_story(lost, moved))
    times = replace(USUAL, decode_s=1.0, decode_beside=8.0)
    slow = make_attempt(ended_us=1_051_000, times=times)
    causes = [(cause.name, cause.us) for cause in verdict_on(late_story(slow), known).causes]
    assert causes == [("overload", 719_100), ("lost worker", 180_900)]


def test_a_worker_without_a_core_explains_its_slow_steps() -> None:
    known = Surroundings()
    for at_s, wait_s in ((999.5, 3.0), (1_000.5, 3.25), (1_001.5, 4.0)):
        known.add_loads({"w1": Load(core_wait_s=wait_s)}, at_s)
    slow = make_attempt(ended_us=1_551_000, times=replace(USUAL, decode_s=1.5))
    verdict = verdict_on(late_story(slow), known)
    assert (verdict.cause, verdict.causes[0].us) == ("busy machine", 862_249)
    assert "in stage decode while w1 was ready, but had no core" in verdict.text
    assert verdict_on(late_story(slow)).cause == "unexplained: decode"
    slow.load = 9
    assert verdict_on(late_story(slow), known).cause == "overload", "these need the cores"


def test_stages_that_are_late_together_count_as_late() -> None:
    times = replace(USUAL, prefill_s=0.118, decode_s=0.145)
    slow = make_attempt(first_us=121_000, ended_us=266_000, times=times, load=9)
    causes = [(cause.name, cause.stage) for cause in verdict_on(late_story(slow)).causes]
    assert causes == [("overload", "prefill"), ("overload", "decode")]
    times = replace(times, prefill_s=0.060)
    slow = make_attempt(first_us=63_000, ended_us=208_000, times=times, load=9)
    assert verdict_on(late_story(slow)).causes == ()


def test_a_frontend_that_stood_still_is_no_slow_client() -> None:
    known = Surroundings(pauses={"frontend-1": deque([(1_000.9, 0.5)])})
    story = make_story(ended_us=1_152_000, stalled_us=1_000_000)
    causes = [(cause.name, cause.us) for cause in verdict_on(story, known).causes]
    assert causes == [("slow client", 500_000), ("stalled loop", 500_000)]


def test_workers_that_start_again_do_not_add_up() -> None:
    known = Surroundings()
    for number in range(MAX_WORKERS + 10):
        worker = f"w{number}"
        lost = make_attempt(worker=worker, error="worker_failed")
        known.add_moves(make_story(lost, make_attempt(worker=f"{worker}-again")))
        known.add_prefills(make_story(make_attempt(worker=worker, prompt_tokens=9_000)))
        known.add_loads({worker: Load(last_pause=(number, 0.2))}, number)
    tables = known.moves, known.prefills, known.pauses
    assert [len(table) for table in tables] == [MAX_WORKERS] * len(tables)
    assert "w0" not in known.pauses
    assert worker in known.pauses
