"""Arguments of foreign engines, and the check of their packages."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.external_inputs import install_module, make_inputs

from dynamo.cli.engine_check import check_engines
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.inference.echo import EchoEngine
from dynamo.inference.engines.arguments import (
    ENGINE_TABLES,
    check_role,
    check_roles,
    engine_arguments,
    engine_environment,
    explain_arguments,
    needs_connector,
)
from dynamo.inference.engines.packages import (
    ENGINE_PACKAGES,
    argument_names,
    check_engine_package,
    engine_status,
)
from dynamo.inference.worker import EngineWorker

ALL = """
engine:
  kind: {kind}
  block_size: 32
  num_blocks: 100
  max_num_seqs: 8
  max_num_batched_tokens: 512
  prefix_caching: false
  {more}
model:
  max_model_len: 4096
  tensor_parallel_size: 2
  pipeline_parallel_size: 3
  gpu_memory_utilization: 0.8
  quantization: {quantization}
"""


def read(text: str) -> Settings:
    return resolve_settings({}, {}, (text, "f.yaml")).settings


def arguments_of(kind: str, more: str = "", quantization: str = "awq") -> dict[str, object]:
    text = ALL.replace("{more}", more).replace("{quantization}", quantization)
    return engine_arguments(read(text.replace("{kind}", kind)))


def test_every_row_names_a_setting() -> None:
    known = setting_specs_by_key()
    for table in ENGINE_TABLES.values():
        assert not set(table) - set(known)


def test_settings_become_arguments_of_vllm() -> None:
    assert arguments_of("vllm", "kv_cache_dtype: fp16") == {
        "max_model_len": 4096,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "gpu_memory_utilization": 0.8,
        "num_gpu_blocks_override": 100,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "float16",
        "quantization": "awq",
    }


def test_settings_become_arguments_of_sglang() -> None:
    assert arguments_of("sglang", "kv_cache_dtype: fp8") == {
        "context_length": 4096,
        "tp_size": 2,
        "pp_size": 3,
        "mem_fraction_static": 0.8,
        "max_total_tokens": 3200,
        "page_size": 32,
        "max_running_requests": 8,
        "chunked_prefill_size": 512,
        "disable_radix_cache": True,
        "kv_cache_dtype": "fp8_e4m3",
        "quantization": "awq",
    }


@pytest.mark.parametrize("kind", ["trtllm", "tensorrt_llm"])
def test_settings_become_arguments_of_tensorrt_llm(kind: str) -> None:
    assert arguments_of(kind, "swap_space: 2") == {
        "max_seq_len": 4096,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "kv_cache_config": {
            "free_gpu_memory_fraction": 0.8,
            "max_tokens": 3200,
            "tokens_per_block": 32,
            "enable_block_reuse": False,
            "host_cache_size": 2 << 30,
        },
        "max_batch_size": 8,
        "max_num_tokens": 512,
    }


def test_settings_become_arguments_of_llama_cpp() -> None:
    assert arguments_of("llamacpp", "threads: 2", quantization="null") == {
        "n_ctx": 8 * 4096,
        "n_parallel": 8,
        "n_batch": 512,
        "cache_prompt": False,
        "cpuparams": {"n_threads": 2},
    }


@pytest.mark.parametrize("kind", sorted(ENGINE_TABLES))
def test_defaults_leave_the_engine_its_own(kind: str) -> None:
    assert engine_arguments(read(f"engine: {{kind: {kind}}}")) == {}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("kind: vllm, quantization: squeezellm", "engine.quantization = squeezellm", "awq or gptq"),
        ("kind: sglang, kv_cache_dtype: fp16", "engine.kv_cache_dtype = fp16", "use auto"),
        ("kind: llamacpp, data_parallel_size: 2", "engine.data_parallel_size = 2", "--workers"),
        ("kind: native, quantization: gptq", "engine.quantization = gptq", "vllm"),
        ("kind: native, args: {a: 1}", "no arguments of its own", "section engine"),
    ],
)
def test_what_an_engine_lacks_is_an_error_with_what_to_use(
    text: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_arguments(read(f"engine: {{{text}}}"))

    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_setting_without_influence_on_answers_is_a_note() -> None:
    settings = read("engine: {kind: vllm, swap_space: 4}")

    (argument,) = explain_arguments(settings)

    assert argument.key == "engine.swap_space"
    assert "no effect with engine vllm" in argument.note
    assert engine_arguments(settings) == {}


def test_settings_of_a_server_behind_a_url_are_notes() -> None:
    settings = read("engine: {kind: openai, tensor_parallel_size: 2, quantization: awq}")

    notes = [argument.note for argument in explain_arguments(settings)]

    assert len(notes) == 2
    assert all("where the server is started" in note for note in notes)
    assert engine_arguments(settings) == {}


def test_further_arguments_are_passed_and_win() -> None:
    settings = read(
        "engine:\n  kind: trtllm\n  max_num_seqs: 4\n"
        "  args: {--max-batch-size: 8, kv_cache_config.copy_on_partial_reuse: false}"
    )

    assert engine_arguments(settings) == {
        "max_batch_size": 8,
        "kv_cache_config": {"copy_on_partial_reuse": False},
    }


def test_mappings_are_merged_and_the_settings_stay_as_they_are() -> None:
    settings = read(
        "engine:\n  kind: trtllm\n  block_size: 32\n"
        "  args: {kv_cache_config: {dtype: fp8}, kv_cache_config.max_tokens: 64}"
    )

    assert engine_arguments(settings) == {
        "kv_cache_config": {"tokens_per_block": 32, "dtype": "fp8", "max_tokens": 64}
    }
    assert settings.engine.args["kv_cache_config"] == {"dtype": "fp8"}


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("trtllm", "kv_cache_config: x", "kv_cache_config is 'x', not a mapping"),
        ("trtllm", "kv_cache_config: x, kv_cache_config.dtype: fp8", "kv_cache_config is 'x'"),
        ("trtllm", "kv_cache_config.dtype: fp8, kv_cache_config: x", "kv_cache_config is 'x'"),
        ("vllm", "kv_events_config: {}", "kv_events_config of engine vllm is set by dynamo"),
        ("sglang", "kv_events_config.topic: a", "kv_events_config of engine sglang is set"),
        ("sglang", "disaggregation_mode: decode", "disaggregation_mode of engine sglang is set"),
    ],
)
def test_arguments_that_cannot_be_set(kind: str, args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_arguments(read(f"engine: {{kind: {kind}, args: {{{args}}}}}"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_need_an_engine_whose_workers_exchange_blocks(role: str) -> None:
    for kind in ("sglang", "trtllm", "tensorrt_llm", "llamacpp", "openai", "echo"):
        with pytest.raises(ConfigError, match=f"cannot have the role {role}") as caught:
            check_engines([read(f"engine: {{kind: {kind}, role: {role}}}")], {})
        assert "native, mock, vllm" in caught.value.hint
    for kind in ("native", "mock"):
        check_engines([read(f"engine: {{kind: {kind}, role: {role}}}")], {})


def test_roles_of_vllm_need_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match="the package nixl is not installed") as caught:
        check_role("vllm", "decode")
    assert caught.value.hint == "pip install nixl"
    install_module(monkeypatch, "nixl")
    check_role("vllm", "decode")


@pytest.mark.parametrize(("mode", "needed"), [("flexible", True), ("predicted", False)])
def test_vllm_has_a_connector_where_workers_compute_prompts_for_each_other(
    monkeypatch: pytest.MonkeyPatch, mode: str, needed: bool
) -> None:
    text = f"{{router: {{disaggregation: {{mode: {mode}}}}}, engine: {{kind: %s}}}}"
    assert needs_connector(read(text % "vllm")) == needed
    assert not needs_connector(read(text % "native"))
    monkeypatch.setitem(sys.modules, "nixl", None)
    check_roles(read(text % "native"))
    if needed:
        with pytest.raises(ConfigError, match="needs NIXL for the role flexible"):
            check_roles(read(text % "vllm"))
    else:
        check_roles(read(text % "vllm"))


async def test_a_serving_worker_refuses_a_role_that_its_engine_lacks(tmp_path: Path) -> None:
    inputs = make_inputs("echo", tmp_path)
    worker = EngineWorker(EchoEngine(context_tokens=90), inputs.card)
    runtime: Any = SimpleNamespace(settings=inputs.settings)
    outgoing: Any = None
    worker._runtime = runtime
    with pytest.raises(ConfigError, match="engine echo cannot have the role decode"):
        await worker._set_role(b"decode", outgoing)


def test_devices_of_the_settings_are_the_only_visible_ones() -> None:
    assert engine_environment(read("engine: {device_ids: [2, 3]}")) == {
        "CUDA_VISIBLE_DEVICES": "2,3"
    }
    assert engine_environment(read("")) == {}


def install(folder: Path, version: str, requires: str = "", module: str = "vllm") -> None:
    """Write a package that only has what the checks read."""
    (folder / module / "engine").mkdir(parents=True)
    (folder / module / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / module / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    gpu_memory_utilization: float = 0.9\n    _secret: int = 0\n"
        "class AsyncEngineArgs(EngineArgs):\n    enable_log_requests: bool = False\n"
    )
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
    if requires:
        with (info / "METADATA").open("a") as file:
            file.write(f"Requires-Dist: {requires}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that the interpreter finds, without any installed engine."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.path_importer_cache.pop(str(tmp_path), None)
    for package in ENGINE_PACKAGES.values():
        monkeypatch.delitem(sys.modules, package.module, raising=False)
    return tmp_path


@pytest.mark.parametrize("kind", ["tensorrt_llm", *ENGINE_PACKAGES])
def test_a_missing_engine_is_an_error_with_one_command(kind: str, site: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not installed; supported: from \d") as caught:
        check_engine_package(kind)

    assert "-m pip install" in caught.value.hint


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "1.0"])
def test_a_version_outside_the_range_is_an_error(version: str, site: Path) -> None:
    install(site, version)

    with pytest.raises(ConfigError) as caught:
        check_engine_package("vllm")

    text = f"vLLM {version} is installed; supported: from 0.24 to before 0.34"
    assert caught.value.message == text


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0+cpu", "0.33.1rc2"])
def test_a_version_inside_the_range_is_accepted(version: str, site: Path) -> None:
    install(site, version)

    check_engine_package("vllm")

    assert engine_status("vllm").version == version


def test_a_wrong_torch_is_an_error(site: Path) -> None:
    install(site, "0.32.0", "torch==2.13.0+cpu ; platform_machine == 'x86_64'")
    assert "torch none is installed" in engine_status("vllm").problem

    (site / "torch-2.14.1.dist-info").mkdir()
    file = site / "torch-2.14.1.dist-info" / "METADATA"
    file.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    text = "vLLM 0.32.0 is built for torch 2.13.0; torch 2.14.1 is installed"
    importlib.invalidate_caches()
    assert engine_status("vllm").problem == text


def test_an_unknown_argument_names_the_nearest_of_the_installed_version(site: Path) -> None:
    settings = read("engine: {kind: vllm, args: {gpu_memory_utilisation: 0.5}}")
    assert engine_arguments(settings) == {"gpu_memory_utilisation": 0.5}  # nothing to compare with

    install(site, "0.32.0")
    assert argument_names("vllm") == {"gpu_memory_utilization", "enable_log_requests"}
    with pytest.raises(ConfigError) as caught:
        engine_arguments(settings)

    assert "vLLM 0.32.0 has no argument 'gpu_memory_utilisation'" in caught.value.message
    assert caught.value.hint == "did you mean 'gpu_memory_utilization'?"


def test_arguments_of_sglang_are_spread_over_files(site: Path) -> None:
    install(site, "0.5.23", module="sglang")
    fields = site / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "memory.py").write_text("class Memory:\n    page_size: int = 1\n")
    (fields / "model.py").write_text("class Model:\n    model_path: str = ''\n")

    assert argument_names("sglang") == {"page_size", "model_path"}
