"""`dynamo configure`: its files, its exit codes, and wrong input."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from dynamo.cli import main
from dynamo.operations.configure import finalists

ASK = ["configure", "Qwen/Qwen3-32B", "--gpu", "h100_sxm", "--engine", "vllm", "--gpus", "8"]
PROMISE = ["--good", "ttft=1s,tpot=30ms"]
CONFIG = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 50000,
}
Captured = pytest.CaptureFixture[str]


def test_a_folder_gets_all_files_and_the_configuration_can_be_checked(
    tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("matplotlib")
    out, plans = tmp_path / "plan", tmp_path / "plans.json"

    assert main([*ASK, *PROMISE, "--out", str(out), "--json", str(plans)]) == 0

    assert ", pareto.png" in capsys.readouterr().out
    names = "compose.yaml graph.yaml pareto.png prefill-timing.json serve.yaml timing.json why.md"
    assert sorted(path.name for path in out.iterdir()) == names.split()
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "timing.json").read_text())["c0"] > 0
    best = json.loads(plans.read_text())["plans"][0]
    capsys.readouterr()
    for name in ("serve.yaml", "graph.yaml"):
        assert main([*ASK[:6], *PROMISE, "--check", str(out / name)]) == 0
        assert best["layout"]["engine"] in capsys.readouterr().out
    assert main([*ASK, *PROMISE, "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_config_json_is_enough(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    ask = ["--gpu", "l40s", "--rate", "5", "--isl", "500", "--osl", "100"]
    assert main(["configure", str(tmp_path), *ask]) == 0

    assert tmp_path.name in capsys.readouterr().out


def test_a_trace_gives_lengths_cached_tokens_and_rate(tmp_path: Path, capsys: Captured) -> None:
    rows = [
        {"timestamp": 500 * n, "input_length": 1024, "output_length": 64, "hash_ids": [1, 2 + n]}
        for n in range(8)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    ask = [*ASK[:6], "--trace", str(trace), "--out", str(tmp_path / "plan")]
    assert main(ask) == 0

    assert "1024 + 64 tokens" in capsys.readouterr().out
    assert "448 of them cached" in (tmp_path / "plan" / "why.md").read_text()


def test_nothing_that_fits_is_exit_code_1_with_the_nearest(capsys: Captured) -> None:
    assert main([*ASK, "--good", "tpot=100us"]) == 1

    assert "TPOT binds" in capsys.readouterr().err


def test_an_interrupt_while_plans_are_replayed_keeps_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finalists, "replay_plan", interrupt)

    assert main([*ASK, *PROMISE, "--out", str(tmp_path / "plan")]) == 130

    assert (tmp_path / "plan" / "serve.yaml").exists()
    assert "Interrupted" in (tmp_path / "plan" / "why.md").read_text()


def test_gpus_that_cannot_bear_a_rate_are_told_the_rate_that_they_bear(capsys: Captured) -> None:
    ask = [*ASK[:6], "--gpus", "4", "--good", "tpot=30ms", "--rate"]
    assert main([*ask, "500"]) == 1

    rate = capsys.readouterr().err.split("--rate ")[1].split(",")[0]
    assert main([*ask, rate]) == 0


def test_rows_go_to_a_file(tmp_path: Path) -> None:
    row = {
        "id": "a_c8_tp4_ep1_1",
        "backend": "vllm",
        "model_path": "Qwen/Qwen3-32B",
        "system": "h100_sxm",
        "mode": "agg",
        "isl": "1024",
        "osl": "512",
    }
    rows, predicted = tmp_path / "rows.csv", tmp_path / "predicted.json"
    with rows.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows([row, {**row, "id": "b", "system": "none"}])

    assert main(["configure", "--rows", str(rows), "--json", str(predicted)]) == 1

    good, bad = json.loads(predicted.read_text())
    assert good["ttft_ms_low"] < good["ttft_ms"] < good["ttft_ms_high"]
    assert "unknown GPU 'none'" in bad["error"]


def test_a_measured_run_corrects_what_is_predicted(tmp_path: Path, capsys: Captured) -> None:
    summary = {"n": 100, "mean": 50.0}
    result = {
        "seconds": 100.0,
        "requests": 200,
        "failed": 0,
        "errors": {},
        "requests_per_s": 2.0,
        "prompt_tokens": 800_000,
        "output_tokens": 200_000,
        "output_tokens_per_s": 2000.0,
        "cached_tokens": 0,
        "cached_ratio": 0.0,
        "events_per_token": 1.0,
        "ttft_ms": {**summary, "mean": 700.0},
        "itl_ms": summary,
        "tpot_ms": summary,
        "e2e_ms": {**summary, "mean": 16_000.0},
    }
    bench, serve = tmp_path / "bench.json", tmp_path / "serve.yaml"
    bench.write_text(json.dumps(result))
    serve.write_text(
        "engine: {kind: vllm, tensor_parallel_size: 4, max_num_seqs: 40, kv_cache_dtype: fp8}\n"
    )
    check = [*ASK[:6], "--check", str(serve), "--json", str(tmp_path / "plan.json")]

    times = []
    for more in ([], ["--measured", str(bench)]):
        assert main([*check, *more]) == 0
        times.append(json.loads((tmp_path / "plan.json").read_text())["tpot_ms"])
    capsys.readouterr()

    assert abs(times[1] - 50) < 0.5 * abs(times[0] - 50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["configure"], "which model?"),
        (["configure", "Qwen/Qwen3-32B"], "which GPU?"),
        (["configure", "Qwen/Qwen3-32B", "--gpu", "h100"], "did you mean 'h100_sxm'?"),
        (["configure", "Qwen/Qwen3-33B", "--gpu", "l40s"], "did you mean 'Qwen/Qwen3-32B'?"),
        (["configure", "./nothing.json", "--gpu", "l40s"], "cannot read nothing.json"),
        (ASK[:4], "--gpus or --rate"),
        ([*ASK, "--engine", "vlm"], "did you mean 'vllm'?"),
        ([*ASK, "--gpus", "0"], "0 is not above 0"),
        ([*ASK, "--gpus", "1000000"], "1000000 is not above 0 and at most 65536"),
        ([*ASK, "--rate", "nan"], "nan is not above 0"),
        ([*ASK, "--isl", "-1"], "-1 is not above 0"),
        ([*ASK, "--prefix", "4000"], "--prefix is less than --isl"),
        ([*ASK, "--isl", "90000"], "exceed the context"),
        ([*ASK, "--good", "tpot=30"], "write tpot=30ms or tpot=30s"),
        ([*ASK, "--good", "tpot=0ms"], "must be above 0"),
        ([*ASK, "--good", "tpot=30ms,tpot=2s"], "gives a name twice"),
        ([*ASK, "--good", "e2e=3s"], "names of ttft, tpot"),
        ([*ASK, "--precision", "fp3"], "--precision fp3 is unknown"),
        ([*ASK, "--trace", "nothing.jsonl"], "nothing.jsonl"),
        ([*ASK, "--check", "nothing.yaml"], "cannot read nothing.yaml"),
        ([*ASK, "--measured", "nothing.json"], "`dynamo bench --out FILE` writes one"),
        (["configure", "--rows", "nothing.csv"], "--rows needs a file"),
        (["configure", "--rows", "nothing.csv", "--json", "-"], "cannot read nothing.csv"),
    ],
)
def test_wrong_input_is_told_in_a_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(arguments) == 2

    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services: {frontend: {}}", "has no workers that answer"),
        ("services: [3]", "services is no mapping"),
        ("a: [\n- b", "in line 2"),
        ("c0: 4.5", "unknown setting 'c0'"),
        ("engine: {kind: vllm, tensor_parallel_size: abc}", "wanted a number"),
        ("engine: {kind: vllm, workers: -3}", "at least 0"),
        ("engine: {kind: sglang, args: {dp_size: x}}", "'x' where a number from 1"),
        ("engine: {kind: vllm, tensor_parallel_size: 7}", "does not divide the 64 heads"),
        ("kind: DynamoGraphDeployment\nspec: {components: [3]}", "components is no list"),
        (
            (
                "kind: DynamoGraphDeployment\nspec: {components: [{podTemplate: {spec: {containers: "
                "[{command: [dynamo.vllm, --tensor-parallel-size]}]}}}]}"
            ),
            "'' where a number from 1",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, capsys: Captured, text: str, message: str
) -> None:
    configuration = tmp_path / "given.yaml"
    configuration.write_text(text)

    assert main([*ASK[:4], "--check", str(configuration)]) == 2

    assert message in capsys.readouterr().err


def test_weights_that_do_not_fit_the_given_gpus_are_refused(
    tmp_path: Path, capsys: Captured
) -> None:
    configuration = tmp_path / "given.yaml"
    configuration.write_text("engine: {kind: vllm}")

    arguments = [
        "configure",
        "deepseek-ai/DeepSeek-R1",
        "--gpu",
        "h100_sxm",
        "--check",
        str(configuration),
    ]
    assert main(arguments) == 2

    assert "672 GB of weights do not fit each h100_sxm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "lines",
    ["", '{"timestamp": 1, "input_len', '{"timestamp": "x", "input_length": 1}\n', "[1]\n"],
)
def test_a_trace_that_cannot_be_read_is_exit_code_2(
    tmp_path: Path, capsys: Captured, lines: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(lines)

    assert main([*ASK, "--trace", str(trace)]) == 2

    assert str(trace) in capsys.readouterr().err


@pytest.mark.skipif(
    not Path("/dev/full").exists() or not os.access("/dev/full", os.W_OK), reason=""
)
@pytest.mark.parametrize("name", ["why.md", "pareto.png"])
def test_a_full_disk_is_told(tmp_path: Path, capsys: Captured, name: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan"
    out.mkdir()
    (out / name).symlink_to("/dev/full")

    assert main([*ASK, *PROMISE, "--out", str(out), "--force"]) == 2

    assert "No space left" in capsys.readouterr().err
