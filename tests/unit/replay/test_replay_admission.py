"""Admission before a replayed cluster, and what the result says of its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.cli.benchmark.replay import run

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "chats.jsonl")
FLAGS = [TRACE, "--trace-block-size", "64", "--workers", "2", "--json", "-"]
CROWDED = [*FLAGS, "--speed", "20", "--max-num-seqs", "2", "--timing", "constant:0.05,20"]


def replayed(capsys, *flags: str) -> dict:
    assert run([*flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mode", ["round_robin", "adaptive", "kv"])
def test_a_promise_is_kept_to_those_taken(mode, capsys):
    flags = [*CROWDED, "--router-mode", mode]
    before = replayed(capsys, *flags)
    assert before["rejected"] == 0
    assert before["completed"] == 64
    promised = replayed(capsys, *flags, "--ttft-slo", "2")
    assert promised["rejected"] == promised["errors"]["overloaded"] > 0
    assert promised["rejected"] + promised["completed"] == 64
    assert promised["ttft_ms"]["p90"] <= 2_000 < before["ttft_ms"]["p90"]
    assert promised["settings"]["ttft_slo"] == 2


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
def test_nobody_waits_beyond_the_longest_wait(mode, capsys):
    flags = [*CROWDED, "--router-mode", mode]
    said = replayed(capsys, *flags, "--max-queue-wait", "1")
    assert said["rejected"] > 0
    patient = replayed(capsys, *flags, "--max-queue-wait", "1000000")
    assert patient["rejected"] == 0
    assert patient["settings"]["max_queue_wait"] == 1_000_000


def test_a_cap_makes_others_wait_and_turns_nobody_away(capsys):
    crowded = [*CROWDED, "--max-num-seqs", "32", "--timing", "constant:0.05,80"]
    shared = replayed(capsys, *crowded)
    alone = replayed(capsys, *crowded, "--max-worker-requests", "1")
    assert alone["completed"] == 64
    assert alone["ttft_ms"]["p90"] > 30_000  # the default longest wait holds only where it is given
    assert alone["itl_ms"]["p99"] == pytest.approx(80, rel=0.01)
    assert shared["itl_ms"]["p99"] > 81


def test_admission_without_a_reason_changes_nothing(capsys):
    flags = [*FLAGS, "--router-mode", "kv"]
    without = replayed(capsys, *flags)
    with_it = replayed(capsys, *flags, "--max-queue-wait", "1000000")
    for key in ("completed", "reuse_first_admission", "requests_per_worker"):
        assert with_it[key] == without[key]
    for key in ("ttft_ms", "e2e_ms"):
        assert with_it[key] == pytest.approx(without[key])


def test_the_table_counts_those_turned_away(capsys):
    assert run([*(flag for flag in CROWDED if flag not in ("--json", "-")), "--ttft-slo", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("rejected ")]
    assert int(line.split()[1]) > 0
    assert f"{line.split()[1]} rejected" in lines[0]
    assert not any(line.startswith("failed") for line in lines)


NAMES = {"smear_s": "--smear"}
ELSEWHERE = {
    "prefix_caching": "",
    "routing_strategy": "",
    "context_tokens": "--model.context_tokens",
    "load_balancing_algorithm": "--router.load_balancing.algorithm",
}


def as_flags(settings: dict) -> list[str]:
    """What has to be said to get these."""
    given: list[str] = []
    for key, value in settings.items():
        flag = NAMES.get(key) or ELSEWHERE.get(key, "--" + key.replace("_", "-"))
        if flag and value not in (None, ""):
            given += [flag, str(value)]
    if not settings["prefix_caching"]:
        given.append("--no-engine.prefix_caching")
    for key, value in settings["routing_strategy"].items():
        given += [f"--router.routing_strategy.{key}", str(value)]
    return given


@pytest.mark.parametrize(
    "flags",
    [
        ["--router-selector", "weighted_random", "--router-temperature", "0.9", "--rows", "40"],
        ["--router-policy", "composite", "--router.routing_strategy.memory_weight", "0.5"],
        ["--router-queue-threshold", "0.5", "--router-queue-order", "shortest", "--smear", "1"],
        ["--ttft-slo", "2", "--router-queue-bound", "5", "--no-engine.prefix_caching"],
    ],
)
def test_the_result_says_how_to_get_it_again(flags, capsys):
    first = replayed(capsys, *CROWDED, "--router-mode", "kv", "--seed", "3", *flags)
    again = replayed(capsys, TRACE, "--json", "-", *as_flags(first["settings"]))
    for said in (first, again):
        del said["wall_s"], said["cpu_s"]
    assert again == first
