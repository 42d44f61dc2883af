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
        percentiles = ["p50", "p90", "p95", "p99", "p999", "max"]
        assert set(summary) == {"n", "mean", "curve", *percentiles}
        values = [summary[name] for name in percentiles]
        assert values[0] > 0
        assert values == sorted(values)
    assert result["output_tokens_per_s"] > 0
    assert result["settings"]["num_blocks"] == 16_384
    assert {"wall_s", "cpu_s"} <= set(result)
    assert result["prefills"] == {"local": 64, "remote": 0}
    assert result["kv_bytes_moved"] == 0
    assert not {"good_share", "capacity", "pareto"} & set(result)
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


def write_script(folder: Path, *lines: str) -> list[str]:
    path = folder / "events.jsonl"
    path.write_text("\n".join(lines))
    return ["--events", str(path)]


@pytest.mark.parametrize("fast", [[], ["--fast"]])
def test_a_script_changes_the_workers(fast, tmp_path, capsys):
    script = write_script(
        tmp_path,
        '{"time": "1s", "action": "start", "count": 2, "startup": 2}',
        '{"time": 5, "action": "die", "worker": 0, "restart": false}',
        '{"time": 6, "action": "drain"}',
    )
    picture = tmp_path / "timeline.png"
    flags = [*script, "--startup", "5s", "--gpus", "6", "--good", "ttft=1ms", *fast]
    assert run([*FLAGS, *flags, "--plot", str(picture), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == result["requests"] == 64
    assert result["broken_promises"] == 64
    assert len(result["requests_per_worker"]) == 5
    changes = [(each["time_s"], each["starting"], each["ready"]) for each in result["timeline"]]
    assert changes[:5] == [(0.0, 0, 3), (1.0, 2, 3), (3.0, 0, 5), (5.0, 0, 4), (6.0, 0, 3)]
    seconds = 3 * result["duration_s"] + 2 * (result["duration_s"] - 1) - (result["duration_s"] - 5)
    assert result["gpu_hours"] * 3600 / 2 < seconds
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_request_waits_while_the_only_worker_starts(tmp_path, capsys):
    script = write_script(tmp_path, '{"time": 0, "action": "die", "count": 3}')
    for fast in ([], ["--fast"]):
        assert run([*FLAGS, *script, "--startup", "30s", *fast, "--json", "-"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["completed"] == 64
        assert result["ttft_ms"]["max"] > 20_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"time": 1, "action": "start", "kind": "wroker"}', "no kind of workers 'wroker'"),
        ('{"time": 1, "action": "start", "count": 1000000}', "1,000,00. workers are too many"),
        ('{"time": -1, "action": "start"}', "not negative"),
        ('{"time": NaN, "action": "start"}', "line 1"),
        ('{"time": "soon", "action": "start"}', "duration"),
        ('{"time": 1, "action": "explode"}', "explode"),
        ('{"time": 1, "action": "role"}', "names a role"),
        ('{"time": 1, "action": "die", "worker": 3}', "no worker 3 at 1 s"),
        ('{"time": 1, "action": "die", "count": 0}', "at least 1"),
        ('{"time": 1, "action": "die", "cuont": 2}', "cuont"),
        ("[1]", "line 1"),
        ('{"time": 1', "line 1"),
    ],
)
def test_a_wrong_script_is_refused_in_one_line(line, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run([*FLAGS, *write_script(tmp_path, line)])


def test_the_time_of_a_start_needs_a_script(tmp_path):
    with pytest.raises(ConfigError, match="no effect without --events"):
        run([*FLAGS, "--startup", "3s"])
    script = write_script(tmp_path, '{"time": 1, "action": "start"}')
    with pytest.raises(ConfigError, match="above the second"):
        run([*FLAGS, *script, "--startup", "30s-3s"])
    with pytest.raises(ConfigError, match="No such file"):
        run([*FLAGS, "--events", str(tmp_path / "none")])


def test_roles_and_transfers_are_set_by_flags(tmp_path, capsys):
    timing = tmp_path / "fast.json"
    timing.write_text('{"type": "linear", "c0": 1, "c1": 0.001}')
    flags = ["--prefill-workers", "1", "--decode-workers", "2", "--disagg", "always"]
    flags += ["--kv-bytes-per-token", "1000", "--prefill-timing", str(timing), "--json", "-"]
    assert run([TRACE, "--trace-block-size", "64", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    remote = result["prefills"]["remote"]
    assert remote > 50
    assert remote + result["prefills"]["local"] == 64
    assert result["kv_bytes_moved"] % 64_000 == 0
    assert result["kv_bytes_moved"] > remote * 64_000
    assert len(result["requests_per_worker"]) == 3
    assert result["requests_per_worker"][0] == remote
    settings = result["settings"]
    assert (settings["workers"], settings["prefill_workers"], settings["disagg"]) == (
        3,
        1,
        "always",
    )
    assert result["ttft_ms"]["p50"] < 15


SYNTHETIC = ["--synthetic", "isl=500,osl=20,requests=200,rate=20", "--workers", "2"]


def test_a_synthetic_load_shares_nothing_and_arrives_at_its_rate(capsys):
    assert run([*SYNTHETIC, "--speed", "2", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == 200
    assert result["reuse_first_admission"] == 0
    assert result["duration_s"] == pytest.approx(5, rel=0.2)
    assert result["output_tokens_per_s"] * result["duration_s"] / 200 == pytest.approx(20, rel=0.05)


def test_good_requests_keep_both_limits(capsys):
    shares = {}
    for limits in ("ttft=1h,tpot=1h", "ttft=1us", "tpot=1us", "ttft=1h,tpot=7.2ms"):
        assert run([*SYNTHETIC, "--good", limits, "--json", "-"]) == 0
        shares[limits] = json.loads(capsys.readouterr().out)["good_share"]
    assert [*shares.values()][:3] == [1, 0, 0]
    assert 0 < shares["ttft=1h,tpot=7.2ms"] < 1


def test_the_capacity_is_the_highest_speed_within_the_limits(capsys):
    flags = [*SYNTHETIC, "--gpus", "4", "--json", "-"]
    assert run([*flags, "--capacity", "tpot_p90=12ms,ttft_p90=1s"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    capacity = result["capacity"]
    assert result["tpot_ms"]["p90"] <= 12
    assert result["settings"]["speed"] == capacity["speed"]
    assert capacity["output_tokens_per_s_per_gpu"] == result["output_tokens_per_s"] / 4
    assert capacity["requests_per_s"] == 200 / result["duration_s"]
    assert "missed" in output.err
    assert run([*flags, "--speed", str(capacity["speed"] * 1.05)]) == 0
    assert json.loads(capsys.readouterr().out)["tpot_ms"]["p90"] > 12


def test_the_pareto_curve_has_a_point_for_each_load(tmp_path, capsys):
    picture = tmp_path / "a.png"
    assert run([*SYNTHETIC, "--pareto", str(picture), "--loads", "2,1", "--json", "-"]) == 0
    points = json.loads(capsys.readouterr().out)["pareto"]
    assert [point["speed"] for point in points] == [1, 2]
    assert points[0]["tokens_per_s_per_user"] > points[1]["tokens_per_s_per_user"]
    assert points[0]["tokens_per_s_per_gpu"] < points[1]["tokens_per_s_per_gpu"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [TRACE, *SYNTHETIC],
        [*SYNTHETIC, "--rows", "3"],
        ["--synthetic", "isl=500,osl=20,rate=20"],
        ["--synthetic", "isl=500,osl=20,requests=0,rate=20"],
        ["--synthetic", "isl=500,osl=20,requests=9,rate=20,turns=2"],
        [TRACE, "--good", "ttft=soon"],
        [TRACE, "--good", "itl=2s"],
        [TRACE, "--good", "tpot=30"],
        [TRACE, "--good", "tpot=30ms,tpot=2s"],
        [TRACE, "--capacity", "ttft_p42=2s"],
        [TRACE, "--capacity", "ttft_p90=0"],
        [TRACE, "--loads", "1,0"],
    ],
)
def test_a_wrong_load_or_limit_is_rejected(wrong):
    with pytest.raises(ConfigError):
        run(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--trace-block-size", "100"],
        ["--speed", "0"],
        ["--smear", "-1"],
        ["--workers", "0"],
        ["--prefill-workers", "2"],
        ["--role", "prefill"],
        ["--kv-bytes-per-token", "0"],
        ["--transfer-gbps", "-1"],
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


def test_counts_of_many_workers_are_a_range(capsys):
    load = "isl=100,osl=2,requests=80,rate=100"
    assert run(["--synthetic", load, "--workers", "40", "--fast"]) == 0
    assert "requests per worker: 2 to 2, half of them at most 2" in capsys.readouterr().out
