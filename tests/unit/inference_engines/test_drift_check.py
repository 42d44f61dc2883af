"""`DriftCheck` and `ViewedRank`: wrong views are repaired, then given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from tests.support.engine_cache import STYLES, FakeEngineCache

from dynamo.core.codec import pack_ids
from dynamo.core.values import BlocksCleared, KvEvent
from dynamo.inference.engines.engine_events import decode_batch
from dynamo.inference.engines.rank import MAX_REPAIRS, MAX_WRONG, ViewedRank
from dynamo.inference.worker_metrics import declare_kv_view_metrics
from dynamo.telemetry.metrics import Registry

PROMPT = pack_ids(range(65))


def make_view(ids: Sequence[int] = range(65)) -> tuple[ViewedRank, list[KvEvent]]:
    """Return a view of a polled engine that holds `ids`, and the list of what it reports."""
    view, events = ViewedRank(16), []
    view.on_kv_events(events.extend)
    fill(view, ids)
    return view, events


def fill(view: ViewedRank, ids: Sequence[int] = range(65)) -> None:
    cache = FakeEngineCache(STYLES["vllm_0.32"])
    cache.compute(ids)
    view.blocks.apply_batch(decode_batch(cache.drain_payload()))


def answer(view: ViewedRank, cached_tokens: int | None) -> None:
    view.drift.on_ended(view.drift.on_submitted(PROMPT, ""), cached_tokens)


def test_right_predictions_are_only_counted() -> None:
    view, _ = make_view()
    for _ in range(100):
        answer(view, 64)
    assert view.drift.counts == Counter({"checked": 100})


def test_unknown_cached_tokens_are_not_checked() -> None:
    view, _ = make_view()
    answer(view, None)
    assert view.drift.counts == Counter({})


def test_wrong_predictions_rebuild_the_view() -> None:
    view, events = make_view()
    for _ in range(MAX_WRONG):
        answer(view, 0)
    assert view.drift.counts == Counter({"checked": 3, "too_high": 3, "repairs": 1})
    assert events[-1] == BlocksCleared()
    assert len(view.blocks) == 0
    answer(view, 0)
    assert view.drift.counts["too_high"] == 3


def test_repairs_that_do_not_help_end_the_view() -> None:
    view, events = make_view()
    for _ in range(MAX_WRONG * (MAX_REPAIRS + 1)):
        fill(view)
        answer(view, 0)
    assert "disagree with its answers" in view.kv_problem
    assert view.drift.counts["repairs"] == MAX_REPAIRS
    assert events[-1] == BlocksCleared()
    fill(view)
    assert (len(view.blocks), view.snapshot_kv_events()) == (0, [])


def test_blocks_that_leave_while_a_request_runs_are_no_error() -> None:
    view, _ = make_view()
    prediction = view.drift.on_submitted(PROMPT, "")
    view.blocks.apply_batch(
        decode_batch(msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}]]))
    )
    fill(view)
    view.drift.on_ended(prediction, 0)
    assert view.drift.counts == Counter({"checked": 1})


def test_low_predictions_count_for_requests_alone() -> None:
    view, _ = make_view(range(40))
    first = view.drift.on_submitted(PROMPT, "")
    second = view.drift.on_submitted(PROMPT, "")
    view.drift.on_ended(second, 64)
    assert view.drift.counts == Counter({"checked": 1})
    view.drift.on_ended(first, 64)
    assert view.drift.counts == Counter({"checked": 2, "too_low": 1})


def test_clear_empties_at_once() -> None:
    view, events = make_view()
    view.clear(view.blocks.clears)
    assert events[-1] == BlocksCleared()
    assert view.blocks.predict(PROMPT) == 0


def test_events_from_before_a_reset_are_dropped() -> None:
    view, _ = make_view()
    view.clear(view.blocks.clears)
    fill(view)
    assert view.blocks.predict(PROMPT) == 0
    view.blocks.apply_batch(
        decode_batch(msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}]]))
    )
    fill(view)
    assert view.blocks.predict(PROMPT) == 64


def test_a_rebuild_during_a_reset_ends_no_events() -> None:
    """The rebuild may be the answer to a gap over the only event of the reset."""
    view, _ = make_view()
    clears_before = view.blocks.clears
    view.blocks.clear()
    view.clear(clears_before)
    fill(view)
    assert view.blocks.predict(PROMPT) == 64


def test_metrics_add_up_the_ranks() -> None:
    ranks = [ViewedRank(make_view()[0]) for _ in range(2)]
    for rank in ranks:
        answer(rank, 64)
    registry = Registry()
    declare_kv_view_metrics(registry, ranks)
    text = registry.render()
    assert 'dynamo_worker_kv_view_total{subject="checks",kind="checked"} 2' in text
