"""Skipping many steps in one event gives the same result as single steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.simulation.conftest import BLOCK, chats, cluster

from dynamo.core.settings.schema_router import RouterSettings
from dynamo.inference import fast_forward
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.workers import ReplayWorkers, SimulatedTier

Tiers = tuple[SimulatedTier, ...]
HOST: Tiers = (SimulatedTier("host", 200, 1e9),)
STORES: Tiers = (SimulatedTier("disk", 300, 3e8), SimulatedTier("shared", 900, 2e8))


def run_replay(
    workers: ReplayWorkers, seed: int, answer: int, mode: str, min_steps: int
) -> ReplayLog:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_forward, "MIN_STEPS", min_steps)
        plan = ReplayPlan("synthetic", workers, RouterSettings(mode=mode), BLOCK, 0)
        return Replay(plan).run(chats(25 if workers.tiers else 10, seed=seed, answer=answer))[1]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    answer=st.integers(2, 200),
    workers=st.integers(1, 3),
    blocks=st.integers(70, 400),
    seqs=st.integers(1, 8),
    mode=st.sampled_from(["round_robin", "kv"]),
    tiers=st.sampled_from([(), HOST, (*HOST, *STORES)]),
)
def test_fast_forward_changes_no_result(
    seed: int, answer: int, workers: int, blocks: int, seqs: int, mode: str, tiers: Tiers
) -> None:
    if tiers:
        workers, blocks = 1, min(blocks, 100)
    check(seed, answer, workers, blocks, seqs, mode, tiers)


def test_a_waiting_prompt_whose_blocks_arrive_is_admitted_in_time() -> None:
    check(8, 100, 1, 110, 6, "kv", (*HOST, *STORES))


def test_a_router_learns_of_an_eviction_when_its_step_has_ended() -> None:
    check(356, 150, 1, 100, 7, "kv", (*HOST, *STORES))


def check(
    seed: int, answer: int, workers: int, blocks: int, seqs: int, mode: str, tiers: Tiers
) -> None:
    replay_workers = replace(
        cluster(workers, num_blocks=blocks, max_num_seqs=seqs),
        tiers=tiers,
        kv_bytes_per_token=16_384,
    )
    skipped = run_replay(replay_workers, seed, answer, mode, 2)
    stepped = run_replay(replay_workers, seed, answer, mode, 1 << 40)
    assert skipped.completed == stepped.completed
    assert skipped.cached_tokens == stepped.cached_tokens
    assert skipped.output_tokens == stepped.output_tokens
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert list(getattr(skipped, name)) == pytest.approx(list(getattr(stepped, name)))
    skipped_gaps, stepped_gaps = skipped.inter_token.summarize(), stepped.inter_token.summarize()
    assert (skipped_gaps.mean, skipped_gaps.p99) == pytest.approx(
        (stepped_gaps.mean, stepped_gaps.p99), rel=2e-3
    )
