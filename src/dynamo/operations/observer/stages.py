"""The stages of a story, which sum up to the whole request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.telemetry.story import AttemptFacts, EndedStory

UNKNOWN = "worker"
"""The stage between a choice and the first token where an engine does not tell its times."""
STAGES = (
    "read", "tokenise", "admit", "place", "send", "queue", "prefill", "transfer", UNKNOWN,
    "decode", "deliver",
)  # fmt: skip


class StageTime(NamedTuple):
    """A stage of a request, from `began_us` for `us`. `attempt`: the number of the attempt, of
    those that `slowest_attempts` returns; None outside of attempts."""

    name: str
    began_us: int
    us: int
    attempt: int | None = None


def slowest_attempts(story: EndedStory) -> Sequence[AttemptFacts]:
    """Return the attempts of the choice that ended last, in order."""
    if not story.attempts:
        return ()
    choice = max(story.attempts, key=lambda attempt: attempt.ended_us).choice
    return [attempt for attempt in story.attempts if attempt.choice == choice]


def find_stages(story: EndedStory) -> list[StageTime]:
    """Return the stages in order. Their times sum up to `ended_us`."""
    spans: list[tuple[str, int, int | None]] = []
    limit_us, loaded = story.limit_us, story.waited_for == "model"
    if loaded:
        spans.append(("admit", limit_us, None))
    spans.append(("read", story.read_us - (limit_us if loaded else 0), None))
    attempts = slowest_attempts(story)
    if limit_us and not loaded:
        spans.append(("admit", limit_us, None))
    passed_us = sum(us for _, us, _ in spans)
    if story.admitting_us is not None:
        spans.append(("tokenise", story.admitting_us - passed_us, None))
        passed_us = story.admitting_us
    for number, attempt in enumerate(attempts):
        if not number:
            spans.append(("admit", attempt.choosing_us - passed_us, None))
            passed_us = attempt.choosing_us
        last = number == len(attempts) - 1
        until_us = story.ended_us if last else attempt.ended_us
        for name, us in _worker_spans(attempt, passed_us, until_us):
            spans.append((name, us, number))
        passed_us = until_us
    if not attempts:
        rest = "read" if story.admitting_us is None and not story.prompt_tokens else "admit"
        if not story.end:  # an embedding
            rest = UNKNOWN
        spans.append((rest, story.ended_us - passed_us, None))
    return _put_in_order(spans, story.ended_us)


def stage_durations(story: EndedStory) -> Sequence[float]:
    """Return the microseconds of each of `STAGES`, as `find_stages` does. Most stories have one
    attempt and take 1 us."""
    read_us, admitting_us, ended_us = story.read_us, story.admitting_us, story.ended_us
    if len(story.attempts) == 1 and not story.limit_us and admitting_us is not None:
        (attempt,) = story.attempts
        times = attempt.times
        first_us, until_us = attempt.first_us, attempt.ended_us
        choosing_us, placed_us = attempt.choosing_us, attempt.placed_us
        if first_us is not None and (
            0 <= read_us <= admitting_us <= choosing_us <= placed_us <= first_us <= until_us
        ):
            queue_us = prefill_us = transfer_us = 0
            rest_us: float = first_us - placed_us
            decode_us: float = until_us - first_us
            unknown_us: float = 0
            if times is None or times.prefill_s is None:
                rest_us, unknown_us = 0, rest_us
            else:
                queue_us, prefill_us, transfer_us = _prompt_times(times)
                rest_us -= queue_us + prefill_us + transfer_us
            if times is not None and times.decode_s is not None:
                decode_us = min(decode_us, times.decode_s * 1e6)
            if rest_us >= 0 and until_us <= ended_us and not (times and times.kv_after_s):
                return (
                    read_us, admitting_us - read_us, choosing_us - admitting_us,
                    placed_us - choosing_us, rest_us, queue_us, prefill_us, transfer_us,
                    unknown_us, decode_us, ended_us - first_us - decode_us,
                )  # fmt: skip
    sums = dict.fromkeys(STAGES, 0)
    for stage in find_stages(story):
        sums[stage.name] += stage.us
    return tuple(sums.values())


def find_worker_stages(attempt: AttemptFacts) -> list[StageTime]:
    """Return the stages of an attempt from the choice of its worker to its end."""
    spans = [(name, us, None) for name, us in _worker_spans(attempt, 0, attempt.ended_us)][1:]
    stages = _put_in_order(spans, max(0, attempt.ended_us - attempt.placed_us))
    return [stage._replace(began_us=stage.began_us + attempt.placed_us) for stage in stages]


def _worker_spans(attempt: AttemptFacts, from_us: int, until_us: int) -> Iterator[tuple[str, int]]:
    yield "place", attempt.placed_us - from_us
    times, first_us = attempt.times or WorkerTimes(), attempt.first_us
    began_us = attempt.ended_us if first_us is None else first_us
    span_us = began_us - attempt.placed_us
    if times.prefill_s is None:
        yield (UNKNOWN if first_us is not None or attempt.error else "send"), span_us
    else:
        queue_us, prefill_us, transfer_us = _prompt_times(times)
        yield "send", span_us - queue_us - prefill_us - transfer_us
        yield "queue", queue_us
        yield "transfer", transfer_us
        yield "prefill", prefill_us
    if first_us is not None:
        decode_us = attempt.ended_us - first_us
        if times.decode_s is not None:
            decode_us = min(decode_us, int(times.decode_s * 1e6))
        after_us = min(decode_us, int((times.kv_after_s or 0.0) * 1e6))
        yield "transfer", after_us
        yield "decode", decode_us - after_us
        began_us = first_us + decode_us
    yield "deliver", until_us - began_us


def _prompt_times(times: WorkerTimes) -> tuple[int, int, int]:
    """Return the microseconds of queue, prefill and transfer, with those of a prefill worker."""
    queue_s, prefill_s, kv_s = times.queue_s or 0.0, times.prefill_s or 0.0, times.kv_s or 0.0
    if not kv_s:
        return round(queue_s * 1e6), round(prefill_s * 1e6), 0
    peer_s = min(kv_s, (times.peer_queue_s or 0.0) + (times.peer_prefill_s or 0.0))
    peer_queue_s = min(peer_s, times.peer_queue_s or 0.0)
    return (
        round((queue_s + peer_queue_s) * 1e6),
        round((prefill_s + peer_s - peer_queue_s) * 1e6),
        round((kv_s - peer_s) * 1e6),
    )


def _put_in_order(spans: Sequence[tuple[str, int, int | None]], total_us: int) -> list[StageTime]:
    """Return the stages that took time. A stage that is shorter than the clocks can tell takes
    its time from the next one, so that the sum stays."""
    stages, at_us, owed_us = [], 0, 0
    for name, span_us, attempt in spans:
        owed_us += span_us
        if owed_us > 0:
            us, owed_us = min(owed_us, total_us - at_us), 0
            if us:
                stages.append(StageTime(name, at_us, us, attempt))
                at_us += us
    if at_us < total_us:
        stages.append(StageTime("deliver", at_us, total_us - at_us))
    return stages
