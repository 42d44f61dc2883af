"""What a router's book of one worker promises: open prompts, tokens, memory, places."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.router.stage import ENGINE, Stage, instance

from dynamo.core.values import Load
from dynamo.scheduling.router.placing.fleet import SURVEY_S, YOUNG_TOKENS, Active, Book
from dynamo.scheduling.router.prompt import Prompt

CAPACITY = int(str(ENGINE["num_blocks"])) * int(str(ENGINE["block_tokens"]))


@pytest.fixture
def stage() -> Stage:
    return Stage(1)


@pytest.fixture
def book(stage: Stage) -> Book:
    return stage.fleet["a"]


def placed(stage: Stage, book: Book, tokens: int, name: str = "one") -> Active:
    active = Active(name, book, Prompt(tokens, ()), tokens, stage.now)
    book.place(active, stage.now)
    return active


def still_open(book: Book) -> tuple[int, int, int]:
    return book.open_count, book.open_tokens, len(book.active)


def test_a_prompt_is_open_until_its_first_token_and_counts_until_its_end(
    stage: Stage, book: Book
) -> None:
    one, other = placed(stage, book, 100), placed(stage, book, 300, "other")
    assert still_open(book) == (2, 400, 2)
    for _ in range(2):
        book.first_token(one, stage.now)
        assert still_open(book) == (1, 300, 2)
    for active in (one, other, one, other):
        book.end(active, stage.now)
        book.first_token(active, stage.now)
    assert still_open(book) == (0, 0, 0)
    assert book.context == 0
    assert book.youth == pytest.approx(0.0)


def test_it_is_free_when_the_last_of_its_prompts_is_expected(stage: Stage, book: Book) -> None:
    took_s = book.service_ms(1_000) / 1e3
    first = placed(stage, book, 1_000)
    assert book.free_s == pytest.approx(stage.now + took_s)
    assert first.due_s == pytest.approx(book.free_s)
    last = placed(stage, book, 1_000, "last")
    assert book.free_s == pytest.approx(stage.now + 2 * took_s)
    assert book.backlog_ms(stage.now) == pytest.approx(2e3 * took_s)
    book.end(first, stage.now)
    book.first_token(last, stage.now)
    assert (book.free_s, book.backlog_ms(stage.now)) == (stage.now, 0.0)


def test_one_that_is_late_takes_as_long_again(stage: Stage, book: Book) -> None:
    placed(stage, book, 1_000)
    assert book.backlog_ms(book.free_s + 2.0) == pytest.approx(2_000.0)


def test_once_one_of_several_came_late_the_others_are_expected_anew(
    stage: Stage, book: Book
) -> None:
    first, _ = placed(stage, book, 1_000), placed(stage, book, 500, "other")
    late = book.free_s + 5.0
    book.first_token(first, late)
    assert book.free_s == pytest.approx(late + book.service_ms(500) / 1e3)


def test_the_steps_that_a_prompt_shares_are_not_waited_for_twice(stage: Stage, book: Book) -> None:
    for number in range(4):
        placed(stage, book, 100, f"before{number}")
    last = placed(stage, book, 100, "last")
    together_ms = book.service_ms(400) + book.service_ms(100)
    assert last.due_s == pytest.approx(stage.now + together_ms / 1e3)
    assert last.due_s < book.free_s


def test_context_and_youth_follow_the_answers(stage: Stage, book: Book) -> None:
    decodes, waits = placed(stage, book, 100), placed(stage, book, 300, "waits")
    book.first_token(decodes, stage.now)
    assert book.context == 100
    decodes.emitted = 30
    stage.now += 1
    book.survey(stage.now)
    assert book.context == 130
    assert book.youth == pytest.approx(1 / (30 + YOUNG_TOKENS) + 1 / YOUNG_TOKENS)
    decodes.emitted = 60
    book.survey(stage.now + SURVEY_S / 2)
    assert book.context == 130
    book.survey(stage.now + 1.01 * SURVEY_S)
    assert book.context == 160
    book.end(decodes, stage.now)
    assert book.context == 0
    assert book.youth == pytest.approx(1 / YOUNG_TOKENS)
    book.end(waits, stage.now)
    assert book.youth == pytest.approx(0.0)


def test_what_the_worker_found_in_its_cache_is_not_waited_for(stage: Stage, book: Book) -> None:
    one, other = placed(stage, book, 1_000), placed(stage, book, 100, "other")
    book.cached(one, 600)
    assert (one.new_tokens, book.open_tokens) == (400, 500)
    book.cached(one, 600)
    assert (one.new_tokens, book.open_tokens) == (1, 101)
    book.first_token(other, stage.now)
    book.cached(other, 50)
    book.end(one, stage.now)
    book.cached(one, 1)
    assert book.open_tokens == 0


def test_of_a_report_only_what_others_sent_is_new(stage: Stage, book: Book) -> None:
    placed(stage, book, 1_000)
    book.told(Load(running=3, waiting=2, prefill_tokens=1_700))
    assert (book.others_tokens, book.others_count) == (700, 4)
    book.told(Load(running=0, waiting=0, prefill_tokens=300))
    assert (book.others_tokens, book.others_count) == (0, 0)


def test_memory_is_the_workers_word_and_what_is_still_to_come(stage: Stage, book: Book) -> None:
    one = placed(stage, book, CAPACITY // 4)
    assert book.memory_share() == pytest.approx(0.25)
    book.first_token(one, stage.now)
    assert book.memory_share() == pytest.approx(0.25)
    book.told(Load(active_blocks=50, total_blocks=100))
    assert book.memory_share() == pytest.approx(0.5)
    placed(stage, book, CAPACITY // 8, "other")
    assert book.memory_share() == pytest.approx(0.625)
    placed(stage, book, CAPACITY, "third")
    assert book.memory_share() == 1.0


def test_load_is_a_steps_tokens_or_the_places_taken(stage: Stage, book: Book) -> None:
    assert book.load_factor() == 0.0
    first = placed(stage, book, book.token_budget // 2)
    assert book.load_factor() == pytest.approx(0.5)
    book.first_token(first, stage.now)
    assert book.load_factor() == pytest.approx(0.01)
    for number in range(74):
        placed(stage, book, 1, f"r{number}")
    assert book.load_factor() == pytest.approx(0.75)
    placed(stage, book, 3 * book.token_budget, "long")
    assert book.load_factor() == 1.0


def test_what_another_router_sent_counts_and_teaches_nothing(stage: Stage, book: Book) -> None:
    before = book.timing.prefill.seen, book.timing.decode.seen
    theirs = Active("theirs", book, Prompt(100, ()), 100, stage.now)
    book.join(theirs, 40, stage.now)
    book.survey(stage.now)
    assert (book.context, book.open_count) == (140, 0)
    theirs.emitted = 100
    stage.now += 3
    book.end(theirs, stage.now)
    assert (book.context, len(book.active)) == (0, 0)
    assert (book.timing.prefill.seen, book.timing.decode.seen) == before


def test_a_worker_that_tells_nothing_of_itself_is_reckoned_with() -> None:
    silent: Any = instance("a", engine=None)
    stage = Stage(1)
    stage.fleet.replace({"quiet": silent})
    book = stage.fleet["quiet"]
    active = placed(stage, book, 10_000)
    assert book.free_s > stage.now
    assert book.memory_share() == 0.0
    assert book.load_factor() == 1.0
    book.first_token(active, stage.now + 1)
    book.end(active, stage.now + 2)
    assert still_open(book) == (0, 0, 0)


def answered(
    stage: Stage, book: Book, tokens: int, step_s: float, pause_s: float = 0.0, name: str = "one"
) -> None:
    """A short prompt, then `tokens` at one each `step_s`, with a pause between."""
    active = placed(stage, book, 16, name)
    stage.now += 0.02
    book.first_token(active, stage.now)
    if pause_s:
        other = placed(stage, book, 4_000, "between")
        before = book.prefill_ms
        stage.now += pause_s
        book.first_token(other, stage.now)
        book.end(other, stage.now)
        pause_s = (book.prefill_ms - before) / 1e3
    stage.now = (active.first_s or 0.0) + pause_s + (tokens - 1) * step_s
    active.emitted = tokens
    book.end(active, stage.now)


def test_a_step_of_decoding_is_learnt_from_whole_answers(stage: Stage, book: Book) -> None:
    for number in range(40):
        answered(stage, book, 101, 0.03, name=f"r{number}")
    assert book.timing.decode.at(1.0, 117) == pytest.approx(30.0, rel=0.02)


def test_what_prefills_took_meanwhile_is_not_its_own(stage: Stage, book: Book) -> None:
    for number in range(10):
        answered(stage, book, 101, 0.03, pause_s=0.5, name=f"r{number}")
    found = book.timing.decode.at(1.0, 117) * book.pace.factor
    assert found == pytest.approx(30.0, rel=0.05)


def test_a_few_tokens_teach_nothing(stage: Stage, book: Book) -> None:
    answered(stage, book, 7, 3.0)
    assert book.timing.decode.seen == 0
    answered(stage, book, 8, 3.0)
    assert book.timing.decode.seen == 1


def test_first_tokens_that_come_together_are_one_observation(stage: Stage, book: Book) -> None:
    pair = [placed(stage, book, 1_000, name) for name in ("one", "two")]
    stage.now += 0.5
    for active in pair:
        book.first_token(active, stage.now)
        stage.now += 0.0005
    assert book.timing.prefill.seen == 1
    assert book.timing.prefill.at(1.0, 2_000) == pytest.approx(500.0, rel=0.02)
    alone = placed(stage, book, 2_000, "three")
    stage.now += 0.5
    book.first_token(alone, stage.now)
    assert book.timing.prefill.seen == 2
