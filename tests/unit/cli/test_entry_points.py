"""The arguments of NVIDIA Dynamo's processes, as settings of this project's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.cli import main
from dynamo.cli.commands import COMMANDS
from dynamo.cli.entry_points.entry import (
    FRONTEND,
    MOCKER,
    PLANNER,
    ROUTER,
    SGLANG,
    TRTLLM,
    VLLM,
    EntryPoint,
)
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import resolve_settings
from dynamo.core.settings.keys import setting_specs_by_key

NAMES: dict[str, Any] = msgspec.json.decode(
    (Path(__file__).parents[2] / "data" / "nvidia_dynamo_flags.json").read_bytes()
)
"""All flags and variables of the parsers of the release `version`, by process."""
ENTRY_POINTS = (FRONTEND, MOCKER, VLLM, SGLANG, TRTLLM, ROUTER, PLANNER)
NAMED = pytest.mark.parametrize("entry", ENTRY_POINTS, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def settings_of(entry: EntryPoint, *arguments: str, **variables: str) -> Any:
    """Return the settings of a process, without those of the planes."""
    values = entry.settings(arguments, {**variables})
    return resolve_settings(values).settings


@NAMED
def test_every_flag_and_variable_has_an_effect_or_a_reason(entry: EntryPoint) -> None:
    flags = entry.flags()

    names = [name for flag in flags for name in flag.names]
    names += [f"--no-{name[2:]}" for flag in flags if flag.kind == "on" for name in flag.names]
    assert set(NAMES[entry.name]["flags"]) <= set(names)
    assert set(NAMES[entry.name]["variables"]) <= {flag.variable for flag in flags}
    assert all(flag.text or flag.effect == "plane" for flag in flags)
    assert {flag.effect for flag in flags} <= {"setting", "plane", "no effect", "refused"}
    keys = {flag.text.split()[0] for flag in flags if flag.effect == "setting"}
    assert keys <= set(setting_specs_by_key())


@NAMED
def test_the_help_names_every_flag(entry: EntryPoint, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"_{entry.name}", "--help"])

    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(name in text for name in NAMES[entry.name]["flags"])


def test_flags_of_a_frontend_become_settings() -> None:
    settings = settings_of(
        FRONTEND,
        *("--http-port", "8123", "--router-mode", "least-loaded", "--migration-limit=3"),
        *("--use-remote-indexer", "--namespace", "shop", "--router-queue-policy", "wspt"),
        DYN_ROUTER_MODE="kv",
        DYN_HTTP_HOST="0.0.0.0",
        DYN_LOGGING_JSONL="1",
    )

    assert settings.worker_count == 0
    assert (settings.server.http_host, settings.server.http_port) == ("0.0.0.0", 8123)
    assert (settings.router.mode, settings.router.queue_order) == ("least_loaded", "shortest")
    assert (settings.router.migration_limit, settings.index.shared) == (3, True)
    assert (settings.runtime.namespace, settings.logging.format) == ("shop", "json")


def test_flags_of_simulated_workers_become_settings() -> None:
    settings = settings_of(
        MOCKER,
        *("--model-path", "/models/qwen", "--num-workers", "3", "--speedup-ratio", "0"),
        *("--num-gpu-blocks-override", "64", "--no-enable-prefix-caching"),
        *("--endpoint", "dyn://shop.backend.generate", "--disaggregation-mode", "agg"),
    )

    engine = settings.engine
    assert (engine.kind, engine.workers, engine.role) == ("mock", 3, "both")
    assert (engine.num_blocks, engine.prefix_caching) == (64, False)
    assert engine.speedup_ratio == 1_000_000
    assert (settings.model.path, settings.runtime.namespace) == ("/models/qwen", "shop")
    assert settings_of(MOCKER, "--is-prefill-worker").engine.role == "prefill"
    assert settings_of(MOCKER, "--disaggregation-mode", "decode").engine.role == "decode"


def test_flags_of_vllm_are_settings_or_its_own_arguments() -> None:
    settings = settings_of(
        VLLM,
        *("--model", "/models/qwen", "--served-model-name", "qwen", "chat", "-tp", "2"),
        *("--enforce-eager", "--kv-transfer-config", '{"kv_connector":"NixlConnector"}'),
        *("--no-enable-log-requests", "--seed=7", "--dyn-tool-call-parser", "hermes"),
    )

    assert (settings.engine.kind, settings.engine.tensor_parallel_size) == ("vllm", 2)
    assert (settings.model.path, settings.model.names) == ("/models/qwen", ("qwen", "chat"))
    assert settings.model.tool_format == "hermes"
    assert settings.engine.args == {
        "enforce_eager": True,
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "enable_log_requests": False,
        "seed": 7,
    }
    with pytest.raises(ConfigError, match="unknown argument 'stray'"):
        settings_of(VLLM, "--model", "/models/qwen", "--seed", "7", "stray")


def test_flags_of_other_engines_are_settings_or_their_own_arguments() -> None:
    settings = settings_of(
        SGLANG,
        *("--model-path", "/models/qwen", "--served-model-name", "qwen", "--tp", "2"),
        *("--disaggregation-mode", "prefill", "--disable-radix-cache", "--host", "0.0.0.0"),
        *("--schedule-policy", "lpm"),
    )
    assert (settings.engine.kind, settings.engine.tensor_parallel_size) == ("sglang", 2)
    assert (settings.engine.role, settings.engine.prefix_caching) == ("prefill", False)
    assert settings.engine.args == {"schedule_policy": "lpm"}
    settings = settings_of(
        TRTLLM, *("--model-path", "/models/qwen", "--max-batch-size", "8", "--kv-block-size", "32")
    )
    assert (settings.engine.kind, settings.engine.max_num_seqs) == ("trtllm", 8)
    assert (settings.model.path, settings.engine.block_size) == ("/models/qwen", 32)


def test_a_planner_reads_its_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"environment": "virtual", "ttft_ms": 200, "enable_load_scaling": True,
              "max_gpu_budget": -1, "advisory": False, "backend": "vllm"}  # fmt: skip
    text = msgspec.json.encode(fields).decode()
    settings = settings_of(PLANNER, "--config", text)
    assert (settings.planner.connector, settings.planner.ttft) == ("virtual", 0.2)
    assert settings.planner.budget is None
    assert "flag --enable-load-scaling has no effect" in capsys.readouterr().err

    (tmp_path / "planner.yaml").write_text("environment: virtual\nitl: 20\nmin_endpoint: 2\n")
    settings = settings_of(PLANNER, f"--config={tmp_path}/planner.yaml")
    assert (settings.planner.itl, settings.planner.min) == (20, 2)


def test_planes_of_flags_win_over_the_environment() -> None:
    environ = {"DYN_DISCOVERY_BACKEND": "mem", "DYN_FILE_KV": "/shared/kv"}

    settings = FRONTEND.settings(["--discovery-backend", "file"], environ)
    assert settings["runtime.discovery"].raw == "file:/shared/kv"

    environ = {"ETCD_ENDPOINTS": "http://10.0.0.1:2379", "NATS_SERVER": "nats://10.0.0.2:4222"}
    settings = MOCKER.settings(["--request-plane", "nats"], environ)
    assert "runtime.discovery" not in settings
    assert settings["discovery.etcd.endpoints"].raw == "http://10.0.0.1:2379"
    assert settings["messaging.nats.servers"].raw == "nats://10.0.0.2:4222"

    own = {"DYNAMO_DISCOVERY__ETCD__ENDPOINTS": "http://own:2379"}
    assert "discovery.etcd.endpoints" not in MOCKER.settings([], environ | own)


def test_processes_without_a_folder_share_one() -> None:
    first = FRONTEND.settings(["--http-port", "8123"], {})["runtime.discovery"].raw
    assert first == MOCKER.settings([], {})["runtime.discovery"].raw
    assert first.startswith("file:")


@pytest.mark.parametrize(
    ("entry", "arguments"),
    [
        (FRONTEND, ["--kserve-grpc-server"]),
        (FRONTEND, ["--router-mode", "direct"]),
        (FRONTEND, ["--response-plane", "quic"]),
        (MOCKER, ["--reasoning", "{}"]),
        (VLLM, ["--disaggregation-mode", "encode"]),
        (SGLANG, ["--embedding-worker"]),
        (TRTLLM, ["--extra-engine-args", "x.yaml"]),
        (ROUTER, ["--serve-indexer"]),
        (PLANNER, ["--environment", "global-planner"]),
    ],
)
def test_what_does_not_exist_is_refused_by_name(entry: EntryPoint, arguments: list[str]) -> None:
    with pytest.raises(Unsupported, match=arguments[0]) as refused:
        entry.settings(arguments, {})

    assert refused.value.hint


def test_a_flag_without_effect_is_named_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    MOCKER.settings(["--stagger-delay", "2", "--router-mode", "kv"], {})
    FRONTEND.settings(["--no-kserve-grpc-server", "--router-temperature", "0.0"], {})

    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(":")[2].partition(" has no effect: ")[0] for note in notes] == [
        " flag --stagger-delay",
        " flag --router-mode",
    ]


def test_unknown_flags_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["_frontend", "--htp-port", "1"]) == 2
    assert "did you mean '--http-port'?" in capsys.readouterr().err
    assert main(["_planner", "--config", '{"ttft_m": 1}']) == 2
    assert "did you mean '--ttft-ms'?" in capsys.readouterr().err
    for text, problem in (
        ("[1", "No such file"),
        ('{"a"', "no document"),
        ('{"ttft": "x"}', "no number"),
    ):
        assert main(["_planner", "--config", text]) == 2
        assert problem in capsys.readouterr().err
    for entry in ENTRY_POINTS:
        assert COMMANDS[f"_{entry.name}"].hidden
    assert "DYNAMO_RUNTIME__DISCOVERY" not in os.environ
