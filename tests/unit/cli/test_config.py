from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo.cli.entry import main

SHIPPED = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))

CUSTOM_MODEL = next(path for path in SHIPPED if path.stem == "custom_model")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYNAMO_CONFIG_PATH", "DYNAMO_LOG", "RUST_LOG", "DYNAMO_OBSERVER__ENABLED"):
        monkeypatch.delenv(name, raising=False)


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["config", "explain", *arguments, "--json"]) == 0
    return {row["key"]: row for row in json.loads(capsys.readouterr().out)["settings"]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_value_of_shipped_files_has_its_line_as_origin(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = explain(capsys, str(path))
    lines = path.read_text().splitlines()
    changed = {key: row for key, row in rows.items() if row["origin"] != "default"}

    assert len(changed) >= 10
    for key, row in changed.items():
        name, _, line = str(row["origin"]).rpartition(":")
        if key == "server.http_workers" and name.startswith("frontend.replicas, "):
            continue
        if key == "engine.workers" and str(row["origin"]).startswith("beside "):
            continue
        assert name == str(path)
        assert key.rpartition(".")[2] in lines[int(line) - 1]


EXPECTED = {
    "agg": {"server.http_port": 8000, "router.mode": "round_robin", "engine.workers": 1},
    "disagg": {
        "router.mode": "kv",
        "prefill_workers[1].device_ids": [4, 5, 6, 7],
        "decode_workers[0].kv_cache.max_cache_size": 24 * 10**9,
        "runtime.lease_ttl": 30.0,
    },
    "custom_model": {
        "model.names": ["custom-llama-7b"],
        "engine.max_num_batched_tokens": 8192,
        "server.request_timeout": 300.0,
        "sampling.stop_tokens": ["</s>", "<|endoftext|>"],
    },
    "distributed": {
        "workers.decode.resources.memory": 32 << 30,
        "router.load_balancing.algorithm": "weighted_round_robin",
        "messaging.nats.reconnect_wait": 0.5,
        "monitoring.custom_metrics[0].buckets": [0.1, 0.5, 1.0, 2.0, 5.0, 10.0],
    },
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_have_the_expected_values(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = explain(capsys, str(path))

    assert {key: rows[key]["value"] for key in EXPECTED[path.stem]} == EXPECTED[path.stem]


def test_the_origin_is_flag_environment_file_or_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("server:\n  port: 1\n  http_host: '::1'\nRetriever: {top_k: 3}\n")
    monkeypatch.setenv("DYNAMO_ENGINE__WORKERS", "2")

    assert main(["config", "explain", str(file), "--http-port", "3"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    assert "server.http_port 3 flag --http-port" in lines
    assert "engine.workers 2 environment DYNAMO_ENGINE__WORKERS" in lines
    assert f"server.http_host ::1 {file}:3" in lines
    assert "server.idle_timeout 75 seconds default" in lines
    assert "cache.cache_policy lru default (not in use yet)" in lines
    assert f"Retriever.top_k 3 {file}:4" in lines


def test_changed_lists_only_settings_that_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("server: {port: 1}")

    assert main(["config", "explain", str(file), "--changed"]) == 0
    assert capsys.readouterr().out.split() == ["server.http_port", "1", f"{file}:1"]


def test_an_unknown_key_is_a_usage_error_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("server:\n  prot: 1\n")

    assert main(["config", "explain", str(file)]) == 2
    err = capsys.readouterr().err
    assert f"unknown setting 'server.prot' ({file}:2)" in err
    assert "did you mean 'server.port'?" in err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Dynamo configuration"


def test_settings_without_effect_are_noted_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dynamo.cli.run import parser
    from dynamo.cli.settings_flags import load_settings

    file = tmp_path / "a.yaml"
    file.write_text("router: {type: kv_aware}\nmonitoring: {grafana: {port: 1}}\n")
    load_settings(parser().parse(["-f", str(file)]))

    err = capsys.readouterr().err
    assert "note: not in use yet: monitoring.grafana.port (" in err
    assert "router" not in err
    assert "Grafana" not in err

    file.write_text("monitoring: {grafana: {enabled: true, port: 3000}}\n")
    load_settings(parser().parse(["-f", str(file)]))
    err = capsys.readouterr().err
    assert "note: monitoring.grafana.enabled (" in err
    assert 'no Grafana is started; the page "watch" of the guide says how' in err

    file.write_text("workers: {decode: {replicas: 8, resources: {gpu: 2}}}\n")
    loaded = load_settings(parser().parse(["-f", str(file), "--workers", "3"]))
    err = capsys.readouterr().err
    assert loaded.settings.workers.decode.replicas == 0
    assert loaded.notes["workers.decode.replicas"] == "engine.workers is given and holds"
    assert "note: not in use yet: workers.decode.resources.gpu (" in err


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"", 0o600, "the file is empty"),
        (b" \n", 0o600, "the file is empty"),
        (b"\xff", 0o600, "not UTF-8"),
        (b"a" * 2_000_000, 0o600, "longer than"),
        (None, 0, "No such file"),
    ],
)
def test_files_of_secrets_that_are_wrong_are_named(
    content: bytes | None,
    mode: int,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)

    assert main(["config", "explain", "--security.secret_file", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"security.secret_file = '{file}'" in error
    assert reason in error
    assert "hint: " in error


def test_a_secret_file_of_an_unknown_user_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "--security.secret_file", "~no-such-user/secret"]) == 2
    assert "home directory" in capsys.readouterr().err


def test_a_secret_file_that_others_can_read_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text("swordfish")
    for mode, is_noted in ((0o600, False), (0o640, False), (0o644, True)):
        file.chmod(mode)
        rows = explain(capsys, "--security.secret_file", str(file))
        assert rows["security.secret"]["value"] == "***"
        assert rows["security.secret"]["origin"] == f"file {file}"
        assert str(rows["security.secret_file"]["note"]).startswith("insecure") == is_noted


def test_the_explained_options_of_services_show_no_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("Store:\n  urls: [redis://u:p@host]\n")
    for flag in ([], ["--json"]):
        assert main(["config", "explain", str(file), *flag, "--model-path", "x://u:p@h"]) == 0
        output = capsys.readouterr().out
        assert "redis://***@host" in output
        assert "u:p" not in output


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_pass_the_check(
    path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model-path", str(tiny_model), "--engine.kind", "mock")
    assert main(["config", "check", str(path), *flags]) == 0
    assert "starts frontend" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disagg", "always"), "no worker is a prefill worker"),
        (("--prefill-workers", "2"), "without a worker that computes answers"),
        (("--transfer-plane", "memory:"), "copies within one process"),
        (("--transfer-plane", "rdma:"), "unknown transfer backend 'rdma'"),
        (("--model-path", "/nonesuch"), "/nonesuch"),
    ],
)
def test_the_check_refuses_what_a_start_refuses(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_arguments_of_the_engine_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--engine.kind=sglang",
        "--tensor-parallel-size=2",
        "--engine.swap_space=4",
        "--engine-arg=disable-overlap-schedule=true",
        '--engine-arg=model_loader_extra_config={"a": 1, "b": 2}',
    ]

    rows = explain(capsys, *arguments)

    assert rows["engine.tensor_parallel_size"]["note"] == "sglang: tp_size"
    assert "no effect with engine sglang" in str(rows["engine.swap_space"]["note"])
    assert rows["engine.args"]["value"] == {
        "disable_overlap_schedule": True,
        "model_loader_extra_config": {"a": 1, "b": 2},
    }


def test_an_engine_that_is_not_installed_is_refused_with_one_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.inference.engines.packages.find_spec", lambda name: None)

    assert main(["config", "check", str(CUSTOM_MODEL)]) == 2

    err = capsys.readouterr().err
    assert "error: vLLM is not installed; supported: from 0.24 to before 0.34" in err
    assert "-m pip install " in err


def test_an_argument_that_the_engine_lacks_names_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model:\n  quantization: squeezellm\n")

    assert main(["config", "check", str(file)]) == 2

    err = capsys.readouterr().err
    assert f"native does not have engine.quantization = squeezellm ({file}:2)" in err
