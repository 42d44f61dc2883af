"""Many steps in one event are the same as one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.conftest import BLOCK, chats, cluster

from dynamo.core.settings.schema_router import RouterSettings as RouterSettings
from dynamo.inference import fast_forward
from dynamo.operations.replay.cluster import ReplayWorkers
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog


def replayed(workers: ReplayWorkers, seed: int, answer: int, mode: str, shortest: int) -> ReplayLog:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_forward, "MIN_STEPS", shortest)
        plan = ReplayPlan("made up", workers, RouterSettings(mode=mode), BLOCK, 0)
        return Replay(plan).run(chats(10, seed=seed, answer=answer))[1]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.integers(2, 200),
    workers=st.integers(1, 3),
    blocks=st.integers(70, 400),
    seqs=st.integers(1, 8),
    mode=st.sampled_from(["round_robin", "kv"]),
)
def test_leaping_changes_nothing(
    seed: int, answer: int, workers: int, blocks: int, seqs: int, mode: str
) -> None:
    made = cluster(workers, num_blocks=blocks, max_num_seqs=seqs)
    leaping = replayed(made, seed, answer, mode, 2)
    stepping = replayed(made, seed, answer, mode, 1 << 40)
    assert leaping.completed == stepping.completed
    assert leaping.cached_tokens == stepping.cached_tokens
    assert leaping.output_tokens == stepping.output_tokens
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert list(getattr(leaping, name)) == pytest.approx(list(getattr(stepping, name)))
    one, other = leaping.inter_token.summarize(), stepping.inter_token.summarize()
    assert (one.mean, one.p99) == pytest.approx((other.mean, other.p99), rel=2e-3)
