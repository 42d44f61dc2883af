"""The command `dynamo replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.cli.benchmark.replay import run
from dynamo.core.errors import ConfigError

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "chats.jsonl")
FLAGS = [TRACE, "--trace-block-size", "64", "--workers", "3"]


def test_the_json_result_has_every_field(tmp_path, capsys):
    out, placed = tmp_path / "out.json", tmp_path / "placed.jsonl"
    assert run([*FLAGS, "--json", str(out), "--decisions", str(placed)]) == 0
    result = json.loads(out.read_bytes())
    assert result["requests"] == result["completed"] == 64
    assert 0 < result["reuse_first_admission"] < 1
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        summary = result[name]
        assert set(summary) == {"n", "mean", "p50", "p90", "p95", "p99", "max", "curve"}
        assert 0 < summary["p50"] <= summary["p90"] <= summary["p99"] <= summary["max"]
    assert result["output_tokens_per_s"] > 0
    assert result["settings"]["num_blocks"] == 16_384
    assert {"wall_s", "cpu_s"} <= set(result)
    lines = [json.loads(line) for line in placed.read_text().splitlines()]
    assert sorted(line["request"] for line in lines) == list(range(64))
    assert {line["worker"] for line in lines} == {0, 1, 2}
    assert all(set(line) == {"request", "worker", "placed_ms"} for line in lines)
    assert "TTFT" in capsys.readouterr().out


def test_json_is_the_only_output_with_a_dash(capsys):
    assert run([*FLAGS, "--router-mode", "kv", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["router_policy"] == "predicted"
    assert result["completed"] == 64


def test_arrival_and_engine_flags_take_effect(capsys):
    timing = ["--timing", "constant:0.05,20", "--speed", "4", "--smear", "1", "--eviction", "lru"]
    small = ["--num-blocks", "200", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    assert run([*FLAGS, *timing, *small, "--rows", "40", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 40
    assert result["tpot_ms"]["p50"] > 20
    assert result["settings"]["eviction"] == "lru"


def test_the_plot_is_a_png_file(tmp_path):
    picture = tmp_path / "a.png"
    assert run([*FLAGS, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--trace-block-size", "100"],
        ["--speed", "0"],
        ["--smear", "-1"],
        ["--workers", "0"],
        ["--timing", "warp"],
        ["--eviction", "fifo"],
        ["--json", "/no/such/folder/out.json"],
        ["--plot", "/no/such/folder/out.png"],
        ["--decisions", "/"],
        ["--speed", "nan"],
        ["--smear", "inf"],
        ["--rows", "-1"],
        ["--trace-block-size", "1.5"],
        ["--migration-limit", "1"],
        ["--http-port", "8001"],
        ["--shared-index"],
        ["--speedup-ratio", "10"],
    ],
)
def test_wrong_flags_are_rejected(wrong):
    with pytest.raises(ConfigError):
        run([TRACE, *wrong])


def test_ranks_are_placed_like_workers(tmp_path, capsys):
    results = {}
    for workers, ranks in (("4", "1"), ("2", "2")):
        placed = tmp_path / f"{ranks}.jsonl"
        flags = ["--workers", workers, "--data-parallel-size", ranks, "--router-mode", "kv"]
        assert run([*FLAGS, *flags, "--json", "-", "--decisions", str(placed)]) == 0
        result = json.loads(capsys.readouterr().out)
        results[ranks] = (result["ttft_ms"], result["requests_per_worker"], placed.read_text())
    assert results["1"] == results["2"]
    assert len(results["2"][1]) == 4


@pytest.mark.parametrize("mode", ["round_robin", "adaptive", "kv"])
def test_every_rank_gets_requests(mode, capsys):
    flags = ["--workers", "2", "--data-parallel-size", "2", "--router-mode", mode]
    assert run([*FLAGS, *flags, "--router-policy", "composite", "--json", "-"]) == 0
    counts = json.loads(capsys.readouterr().out)["requests_per_worker"]
    assert len(counts) == 4
    assert sum(counts) == 64
    assert min(counts) > 0


def test_without_prefix_caching_nothing_is_reused(capsys):
    assert run([*FLAGS, "--no-engine.prefix_caching", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["reuse_first_admission"] == 0


def test_a_failed_request_returns_1(capsys):
    assert run([TRACE, "--trace-block-size", "64", "--num-blocks", "8"]) == 1
    assert "context_length_exceeded" in capsys.readouterr().out
