"""Admission before a replayed cluster, and what the result says of its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.cli.benchmark.replay import run

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "chats.jsonl")
FLAGS = [TRACE, "--trace-block-size", "64", "--workers", "2", "--json", "-"]
CROWDED = [*FLAGS, "--speed", "20", "--max-num-seqs", "2", "--timing", "constant:0.05,20"]


def replay(capsys, *flags: str) -> dict:
    assert run([*flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("mode", ["round_robin", "adaptive", "kv"])
def test_admitted_requests_meet_the_ttft_slo(mode, capsys):
    flags = [*CROWDED, "--router-mode", mode]
    before = replay(capsys, *flags)
    assert before["rejected"] == 0
    assert before["completed"] == 64
    limited = replay(capsys, *flags, "--ttft-slo", "2")
    assert limited["rejected"] == limited["errors"]["overloaded"] > 0
    assert limited["rejected"] + limited["completed"] == 64
    assert limited["ttft_ms"]["p90"] <= 2_000 < before["ttft_ms"]["p90"]
    assert limited["settings"]["ttft_slo"] == 2


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
def test_requests_are_rejected_after_the_longest_wait(mode, capsys):
    flags = [*CROWDED, "--router-mode", mode]
    short_wait = replay(capsys, *flags, "--max-queue-wait", "1")
    assert short_wait["rejected"] > 0
    long_wait = replay(capsys, *flags, "--max-queue-wait", "1000000")
    assert long_wait["rejected"] == 0
    assert long_wait["settings"]["max_queue_wait"] == 1_000_000


def test_a_limit_of_requests_per_worker_queues_and_rejects_nothing(capsys):
    crowded = [*CROWDED, "--max-num-seqs", "32", "--timing", "constant:0.05,80"]
    shared = replay(capsys, *crowded)
    alone = replay(capsys, *crowded, "--max-worker-requests", "1")
    assert alone["completed"] == 64
    assert alone["ttft_ms"]["p90"] > 30_000  # without --max-queue-wait, no wait is too long
    assert alone["itl_ms"]["p99"] == pytest.approx(80, rel=0.01)
    assert shared["itl_ms"]["p99"] > 81


def test_admission_without_contention_changes_nothing(capsys):
    flags = [*FLAGS, "--router-mode", "kv"]
    without = replay(capsys, *flags)
    with_it = replay(capsys, *flags, "--max-queue-wait", "1000000")
    for key in ("completed", "reuse_first_admission", "requests_per_worker"):
        assert with_it[key] == without[key]
    for key in ("ttft_ms", "e2e_ms"):
        assert with_it[key].pop("curve") == pytest.approx(without[key].pop("curve"))
        assert with_it[key] == pytest.approx(without[key])


def test_the_table_counts_rejected_requests(capsys):
    assert run([*(flag for flag in CROWDED if flag not in ("--json", "-")), "--ttft-slo", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("rejected ")]
    assert int(line.split()[1]) > 0
    assert f"{line.split()[1]} rejected" in lines[0]
    assert not any(line.startswith("failed") for line in lines)


FLAGS_BY_KEY = {
    "smear_s": "--smear",
    "prefix_caching": "",
    "routing_strategy": "",
    "context_tokens": "--model.context_tokens",
    "load_balancing_algorithm": "--router.load_balancing.algorithm",
}


def as_flags(settings: dict) -> list[str]:
    """Return the flags that give these settings of a result."""
    flags: list[str] = []
    for key, value in settings.items():
        flag = FLAGS_BY_KEY.get(key, "--" + key.replace("_", "-"))
        if flag and value not in (None, ""):
            flags += [flag, str(value)]
    if not settings["prefix_caching"]:
        flags.append("--no-engine.prefix_caching")
    for key, value in settings["routing_strategy"].items():
        flags += [f"--router.routing_strategy.{key}", str(value)]
    return flags


@pytest.mark.parametrize(
    "flags",
    [
        ["--router-selector", "weighted_random", "--router-temperature", "0.9", "--rows", "40"],
        ["--router-policy", "composite", "--router.routing_strategy.memory_weight", "0.5"],
        ["--router-queue-threshold", "0.5", "--router-queue-order", "shortest", "--smear", "1"],
        ["--ttft-slo", "2", "--router-queue-bound", "5", "--no-engine.prefix_caching"],
    ],
)
def test_the_settings_of_a_result_reproduce_it(flags, capsys):
    first = replay(capsys, *CROWDED, "--router-mode", "kv", "--seed", "3", *flags)
    again = replay(capsys, TRACE, "--json", "-", *as_flags(first["settings"]))
    for result in (first, again):
        del result["wall_s"], result["cpu_s"]
    assert again == first
