"""Groups of workers in settings, and the processes that they become."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import SourcedValue
from dynamo.core.settings.load import LoadedSettings, resolve_settings
from dynamo.services.deployment.launch import deployment_specs, worker_specs


def load(flags: dict[str, object], text: str = "version: 1\n") -> LoadedSettings:
    values = {key: SourcedValue(value, f"flag {key}") for key, value in flags.items()}
    return resolve_settings(values, document=(text, "a.yaml"))


def processes(loaded: LoadedSettings) -> list[tuple[str, str, int]]:
    specs = deployment_specs(loaded.settings)
    engines = [(spec.name, spec.settings.engine) for spec in specs if spec.role == "worker"]
    return [(name, engine.role, engine.max_num_seqs) for name, engine in engines]


def numbered(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range(1, count + 1)]


def test_groups_replace_the_default_worker() -> None:
    loaded = load({"workers.prefill.replicas": 1, "workers.decode.replicas": 2})

    assert processes(loaded) == [
        ("prefill-worker", "prefill", 0),
        ("decode-worker-1", "decode", 0),
        ("decode-worker-2", "decode", 0),
    ]


def test_entries_of_a_list_are_groups_with_their_own_names_and_batches() -> None:
    text = """\
engine: {workers: 1}
prefill_workers: [{name: big, max_batch_size: 4}]
decode_workers: [{replicas: 2}, {name: small}]
"""
    assert processes(load({}, text)) == [
        ("big", "prefill", 4),
        ("decode-worker-1", "decode", 0),
        ("decode-worker-2", "decode", 0),
        ("small", "decode", 0),
        ("worker", "both", 0),
    ]


GROUPS = ("prefill-worker", "decode-worker-1", "decode-worker-2")


@pytest.mark.parametrize(
    "text",
    [
        "workers: {prefill: {replicas: 1}, decode: {replicas: 2}}\n",
        "prefill_workers: [{}]\ndecode_workers: [{replicas: 2}]\n",
    ],
)
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, GROUPS),
        ({"engine.workers": 1}, ["worker"]),
        ({"engine.workers": 0}, []),
        ({"workers.flexible": 2}, numbered("worker", 2)),
        ({"engine.workers": 0, "workers.flexible": 2}, numbered("worker", 2)),
        ({"workers.flexible": 0}, GROUPS),
        ({"workers.prefill.replicas": 0}, GROUPS[1:]),
        ({"workers.prefill.replicas": 2}, [*numbered("prefill-worker", 2), *GROUPS[1:]]),
        ({"workers.decode.replicas": 1}, ["prefill-worker", "decode-worker"]),
        ({"workers.prefill.replicas": 0, "workers.decode.replicas": 0}, ["worker"]),
        ({"engine.workers": 0, "workers.decode.replicas": 1}, ["prefill-worker", "decode-worker"]),
        ({"engine.workers": 0, "workers.prefill.replicas": 0, "workers.decode.replicas": 0}, []),
    ],
)
def test_a_count_replaces_that_of_the_same_workers_in_the_file(
    flags: dict[str, object], names: Sequence[str], text: str
) -> None:
    assert [name for name, _, _ in processes(load(flags, text))] == list(names)
    as_text = {key: str(value) for key, value in flags.items()}
    assert [name for name, _, _ in processes(load(as_text, text))] == list(names)


def test_groups_replace_the_workers_of_the_file_and_no_groups_leave_them() -> None:
    text = "engine: {workers: 3}\n"
    assert len(processes(load({"workers.prefill.replicas": "0"}, text))) == 3
    assert processes(load({"workers.decode.replicas": 1}, text)) == [("decode-worker", "decode", 0)]
    assert len(processes(load({"workers.flexible": 2}, text))) == 2


def test_two_numbers_of_the_same_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.workers = 3 .* and workers\.flexible = 2 "):
        load({"engine.workers": 3, "workers.flexible": 2})
    assert len(processes(load({"engine.workers": 2, "workers.flexible": 2}))) == 2


def test_flexible_workers_have_both_roles_and_their_mode() -> None:
    loaded = load({"workers.flexible": 2})

    assert processes(loaded) == [("worker-1", "both", 0), ("worker-2", "both", 0)]
    assert loaded.settings.router.disaggregation.mode == "flexible"


def test_prefill_workers_alone_are_refused_with_the_flag_that_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        deployment_specs(load({"workers.prefill.replicas": 2}).settings)
    assert "--decode-workers" in caught.value.hint


def test_a_group_names_its_model_and_block_size() -> None:
    text = """\
prefill_workers: [{model: /a, kv_cache: {block_size: 32}}]
decode_workers: [{model: /a, kv_cache: {block_size: 32}}, {model: /b}]
"""
    specs = [spec for spec in deployment_specs(load({}, text).settings) if spec.role == "worker"]

    shown = [(spec.settings.model.path, spec.settings.engine.block_size) for spec in specs]
    assert shown == [("/a", 32), ("/a", 32), ("/b", 16)]


def test_groups_of_a_model_with_blocks_of_different_sizes_are_refused() -> None:
    text = "prefill_workers: [{}]\ndecode_workers: [{kv_cache: {block_size: 32}}]\n"
    with pytest.raises(ConfigError, match=r"hold 32 tokens, those of prefill_workers\[0\] 16"):
        load({}, text)
    assert load({"engine.block_size": 32}, text).settings.decode_workers[0].block_size == 32


@pytest.mark.parametrize("workers", [{"engine.workers": 2}, {"workers.flexible": 2}])
def test_always_without_a_prefill_worker_is_refused(workers: dict[str, object]) -> None:
    loaded = load(workers | {"router.disaggregation.mode": "always"})
    with pytest.raises(ConfigError) as caught:
        deployment_specs(loaded.settings)
    assert "--prefill-workers N" in caught.value.hint


def test_the_devices_of_a_group_are_divided_among_its_workers() -> None:
    text = """\
engine: {device_ids: [0, 1]}
prefill_workers: [{replicas: 2, tensor_parallel_size: 2, device_ids: [2, 3, 4, 5]}]
decode_workers: [{replicas: 2}]
"""
    specs = worker_specs(load({}, text).settings)

    engines = [spec.settings.engine for spec in specs]
    assert [engine.device_ids for engine in engines] == [(2, 3), (4, 5), (0,), (1,)]
    assert [engine.tensor_parallel_size for engine in engines] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "engine: {workers: 2, device_ids: [0, 1, 2]}",
        "engine: {workers: 1, device_ids: [0, 1], tensor_parallel_size: 4}",
        "engine: {workers: 2, device_ids: [0, 1], pipeline_parallel_size: 2}",
    ],
)
def test_devices_that_are_too_few_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="workers cannot share the devices"):
        worker_specs(load({}, text).settings)


def test_frontends_get_no_devices() -> None:
    text = "server: {http_workers: 2}\nengine: {device_ids: [3]}\n"

    specs = deployment_specs(load({}, text).settings)

    assert [spec.role for spec in specs] == ["frontend", "frontend", "worker", "observer"]
    assert specs[2].settings.engine.device_ids == (3,)


def test_a_group_has_its_own_transfer_and_cache() -> None:
    text = """\
nixl: {enable_rdma: true, memory_pool_size: 1MB}
cache: {max_cache_size: 1GB, enable_offloading: true}
prefill_workers: [{name: p, nixl: {enable_rdma: false, memory_pool_size: 2MB}}]
decode_workers:
- {name: d, kv_cache: {max_cache_size: 2GB, enable_offloading: false}}
- {name: e, kv_cache: {offload_targets: [cpu, ssd]}}
"""
    specs = {spec.name: spec.settings for spec in deployment_specs(load({}, text).settings)}
    p, d, e = specs["p"], specs["d"], specs["e"]
    assert (p.nixl.enable_rdma, p.nixl.memory_pool_size) == (False, 2_000_000)
    assert (d.nixl.enable_rdma, d.nixl.memory_pool_size) == (True, 1_000_000)
    assert (p.cache.max_cache_size, p.cache.tiers) == (10**9, ("host",))
    assert (d.cache.max_cache_size, d.cache.tiers) == (2 * 10**9, ())
    assert (e.cache.max_cache_size, e.cache.tiers) == (10**9, ("host", "disk"))


def test_an_unknown_tier_of_a_group_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, "decode_workers: [{kv_cache: {offload_targets: [tape]}}]\nprefill_workers: [{}]\n")
    assert "'tape' in decode_workers[0].kv_cache.offload_targets" in caught.value.message


TWO_MODELS = """\
engine: {kind: mock, num_blocks: 77}
models:
- {path: /a, names: [qwen, q], engine: echo, workers: 2}
- path: /b
  name: org/small
  engine: {block_size: 32}
  prefill_workers: [{replicas: 2}]
  decode_workers: [{}]
"""


def test_processes_of_several_models_are_named_after_them() -> None:
    specs = deployment_specs(load({}, TWO_MODELS).settings)

    assert [(spec.name, spec.model) for spec in specs] == [
        ("frontend", ""),
        ("qwen-worker-1", "qwen"),
        ("qwen-worker-2", "qwen"),
        ("org-small-prefill-worker-1", "org/small"),
        ("org-small-prefill-worker-2", "org/small"),
        ("org-small-decode-worker", "org/small"),
        ("observer", ""),
    ]


def test_workers_of_a_model_have_its_settings_and_know_how_many_share_the_host() -> None:
    specs = {spec.name: spec.settings for spec in deployment_specs(load({}, TWO_MODELS).settings)}

    shown = [
        (own.model.path, own.engine.kind, own.engine.num_blocks, own.engine.block_size)
        for own in (specs["qwen-worker-1"], specs["org-small-decode-worker"])
    ]
    assert shown == [("/a", "echo", 77, 16), ("/b", "mock", 77, 32)]
    assert {settings.worker_count for settings in specs.values()} == {5}
    assert not any(settings.models for settings in specs.values())


def test_one_model_in_a_list_is_named_like_several() -> None:
    text = "models: [{path: /a, name: qwen}]\n"

    assert [spec.name for spec in deployment_specs(load({}, text).settings)] == [
        "frontend",
        "qwen-worker",
        "observer",
    ]


@pytest.mark.parametrize(
    ("second", "name"),
    [
        ("{path: /b, names: [small, qwen]}", "qwen"),
        ("{path: /b, names: [small, q]}", "q"),
        ("{path: /b, name: a/b}, {path: /c, name: a b}", "a-b"),
    ],
)
def test_two_models_of_one_name_are_refused(second: str, name: str) -> None:
    text = f"models: [{{path: /a, names: [qwen, q]}}, {second}]\n"

    with pytest.raises(ConfigError, match=f"both called '{name}'"):
        deployment_specs(load({}, text).settings)


def test_a_model_beside_a_list_of_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path \(flag model\.path\) and models \(a.yaml:"):
        load({"model.path": "/c"}, TWO_MODELS)


def test_prefill_workers_of_one_model_and_decode_workers_of_another_are_refused() -> None:
    text = "prefill_workers: [{model: /a}]\ndecode_workers: [{model: /b}]\n"
    entries = "models:\n- {path: /a, name: qwen, prefill_workers: [{}]}\n- {path: /b, name: q}\n"

    with pytest.raises(ConfigError, match=r"prefill-worker compute prompts of /a.*/b"):
        deployment_specs(load({}, text).settings)
    with pytest.raises(ConfigError, match=r"qwen-prefill-worker compute prompts of qwen.*: q\)"):
        deployment_specs(load({}, entries).settings)


def test_origins_of_an_entry_are_those_of_the_section_where_it_is_silent() -> None:
    loaded = load({}, TWO_MODELS)

    assert loaded.origins["models[0].engine.workers"] == "a.yaml:3"
    assert loaded.origins["models[0].engine.num_blocks"] == "a.yaml:1"
    assert loaded.values["models[1].engine.kind"] == "mock"


@pytest.mark.parametrize(
    "text",
    [
        "model: {path: /m, names: [a, b], adapters: {b: /b}}",
        "models:\n- {path: /m, name: a}\n- {path: /n, names: [c, d], adapters: [x=/x, a=/a]}",
        "models:\n- {path: /m, name: a, adapters: [d=/d]}\n- {path: /n, names: [c, d]}",
    ],
)
def test_an_adapter_that_is_called_like_a_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter '[abd]' is called like a model"):
        worker_specs(load({}, text).settings)


CONFIGS = Path(__file__).parents[3] / "configs"
PROCESSES = {
    "agg": ["frontend", "worker"],
    "custom_model": ["frontend", "worker"],
    "disagg": ["frontend", *numbered("prefill-worker", 2), *numbered("decode-worker", 2)],
    "distributed": [
        *numbered("frontend", 3),
        *numbered("router", 2),
        *numbered("prefill-worker", 4),
        *numbered("decode-worker", 8),
    ],
}


def test_the_processes_of_the_files_for_one_model_keep_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")  # a Prometheus that is installed would run beside them
    names = {
        file.stem: [spec.name for spec in deployment_specs(load({}, file.read_text()).settings)]
        for file in CONFIGS.glob("*.yaml")
    }
    assert names == {name: [*processes, "observer"] for name, processes in PROCESSES.items()}


def test_settings_of_models_on_demand_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_alive = 300 s is for a model that is loaded when"):
        resolve_settings(document=("model: {keep_alive: 5m}", "x.yaml"))
    model = "model: {load: on_demand, keep_alive: 0}"
    assert resolve_settings(document=(model, "x.yaml")).settings.model.keep_alive == 0
    server = "engine: {kind: openai, urls: ['http://h:1']}\nmodel: {load: on_demand}"
    settings = resolve_settings(document=(server, "x.yaml")).settings
    with pytest.raises(ConfigError, match="only the server knows the model's name"):
        worker_specs(settings)
