"""Whole configuration files, among them Dynamo's published ones in both spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, SourcedValue, resolve_settings
from dynamo.core.settings.explain import effective_settings
from dynamo.core.settings.json_schema import json_schema
from dynamo.core.settings.schema_monitoring import PrometheusSettings

PUBLISHED = Path(__file__).parents[2] / "data" / "configurations"


def read(text: str) -> LoadedSettings:
    return resolve_settings(document=(text, "f.yaml"))


def published(name: str) -> LoadedSettings:
    return read((PUBLISHED / name).read_text())


def test_a_config_map_is_read_as_the_file_inside() -> None:
    loaded = published("agg.yaml")
    settings = loaded.settings

    assert settings.server.http_host == "0.0.0.0"
    assert settings.server.http_workers == 4
    assert settings.model.path == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert settings.model.context_tokens == 4096
    assert settings.cache.max_cache_size == 8 * 10**9
    assert settings.logging.format == "json"
    assert loaded.origins["server.http_workers"] == "f.yaml:11"
    assert "cache.max_cache_size" not in loaded.notes


def test_worker_groups_of_one_host_must_not_share_devices() -> None:
    with pytest.raises(ConfigError) as caught:
        published("disagg.yaml")

    assert "device 0 is given to prefill_workers[0] (f.yaml:26) and" in caught.value.message
    assert "decode_workers[0] (f.yaml:40)" in caught.value.message
    assert "host:" in caught.value.hint


def test_other_spellings_of_sections_and_keys_are_accepted() -> None:
    text = (
        (PUBLISHED / "disagg.yaml").read_text().replace('- name: "dec', '- host: b\n    name: "dec')
    )
    loaded = read(text)
    settings = loaded.settings

    assert settings.server.http_port == 8000
    assert settings.router.mode == "kv"
    assert settings.router.port == 8001
    assert settings.router.routing_strategy.load_weight == 0.3
    assert settings.discovery.etcd.endpoints == ("http://etcd:2379",)
    assert settings.messaging.nats.servers == ("nats://nats-server:4222",)
    assert settings.monitoring.prometheus == PrometheusSettings(enabled=True, scrape_interval=10)
    names = [loaded.values[f"decode_workers[{index}].name"] for index in (0, 1)]
    assert names == ["decode-worker-1", "decode-worker-2"]
    assert len(settings.decode_workers) == 2
    assert loaded.values["prefill_workers[0].nixl.memory_pool_size"] == 16 * 10**9
    assert loaded.values["decode_workers[0].kv_cache.offload_targets"] == ("cpu", "ssd")


def test_the_published_file_of_a_custom_model() -> None:
    loaded = published("custom_model.yaml")

    assert loaded.settings.model.path == "/models/custom-llama-7b"
    assert loaded.settings.model.names == ("custom-llama-7b",)
    assert loaded.values["engine.swap_space"] == 4
    assert loaded.settings.engine.kind == "vllm"
    assert loaded.settings.engine.max_num_seqs == 256
    assert loaded.settings.logging.level == "INFO"
    assert "engine.kind" not in loaded.notes


def test_the_published_file_of_several_hosts() -> None:
    loaded = published("distributed.yaml")
    values = loaded.values

    assert loaded.settings.runtime.namespace == "dynamo-prod"
    assert values["workers.prefill.replicas"] == 4
    assert values["workers.prefill.tensor_parallel_size"] == 4
    assert values["workers.prefill.resources.gpu"] == 4
    assert values["workers.prefill.resources.memory"] == 64 << 30
    assert values["monitoring.custom_metrics[0].buckets"][-1] == 10
    assert loaded.origins["monitoring.custom_metrics[0].type"] == "f.yaml:72"
    assert [metric.shows for metric in loaded.settings.monitoring.custom_metrics] == [
        "request_duration",
        "cache_hit_ratio",
        "gpu_utilization",
    ]
    assert loaded.settings.router.mode == "kv"
    assert loaded.settings.router.replicas == 2


def test_frontend_replicas_set_the_number_of_http_workers() -> None:
    document = ("frontend: {replicas: 3}", "f.yaml")

    loaded = resolve_settings({}, {}, document)
    assert loaded.settings.server.http_workers == 3
    assert loaded.origins["server.http_workers"] == "frontend.replicas, f.yaml:1"
    assert "share the port" in loaded.notes["frontend.replicas"]
    loaded = resolve_settings(
        {"server.http_workers": SourcedValue("2", "flag --http-workers")}, {}, document
    )
    assert loaded.settings.server.http_workers == 2
    assert "server.http_workers is given" in loaded.notes["frontend.replicas"]
    with pytest.raises(ConfigError, match="at least 1"):
        resolve_settings({}, {}, ("frontend: {replicas: 0}", "f.yaml"))


def test_a_model_path_replaces_a_hub_name() -> None:
    flag = {"model.path": SourcedValue("./mine", "flag --model-path")}
    settings = resolve_settings(flag, {}, ("model: {name: org/hub}", "f.yaml")).settings

    assert settings.model.path == "./mine"
    assert settings.model.names == ()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("prefill_workers: [{nmae: a}]", "unknown setting 'nmae' (f.yaml:1)", "'name'"),
        ("prefill_workers: {name: a}", "wanted a list of sections", "each begins with"),
        ("prefill_workers:\n- {device_ids: [a]}", "device_ids = ['a'] (f.yaml:2)", ""),
        ("kv_cache: {max_cache_sise: 1}", "unknown setting", "'kv_cache.max_cache_size'"),
        ("router: {type: kv, mode: basic}", "router.mode is given twice", ""),
        ("a: 1\n---\nb: 2", "several YAML documents", ""),
        ("Retriever: 3", "Retriever must be a mapping", ""),
        ("workers: {decode: {resources: {cpu: 2x}}}", "wanted cores", ""),
    ],
)
def test_errors_in_lists_and_sections(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)

    assert message in caught.value.message
    assert hint in caught.value.hint


def test_equal_values_of_two_spellings_are_accepted() -> None:
    assert read("router: {type: basic, mode: round-robin}").settings.router.mode == "round_robin"


def test_units_of_cores_and_memory_are_converted() -> None:
    values = read(
        "model: {swap_space: 512Mi}\nfrontend: {resources: {cpu: 500m, memory: 1Gi}}"
    ).values

    assert values["engine.swap_space"] == 0.5
    assert values["frontend.resources.cpu"] == 0.5
    assert values["frontend.resources.memory"] == 1 << 30


def test_options_of_services_keep_their_lines() -> None:
    services = read("server: {port: 1}\nRetriever:\n  top_k: 3\nOther:\n").services

    assert services["Retriever"]["top_k"] == SourcedValue(3, "f.yaml:3")
    assert services["Other"] == {}


def test_lists_of_sections_in_the_environment_are_json() -> None:
    name = "DYNAMO_MONITORING__CUSTOM_METRICS"
    loaded = resolve_settings(environ={name: '[{"name": "a", "source": "gpu_utilization"}]'})

    assert loaded.values["monitoring.custom_metrics[0].name"] == "a"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("name: tokens_per_watt", "'tokens_per_watt' is no source of a metric"),
        ("name: ''", "'' is no source"),
        ("name: a, source: wat", "'wat' is no source"),
        ("name: cache_hit_ratio, type: counter", "is a gauge, not a counter"),
        ("name: cache_hit_ratio, buckets: [1]", "of a histogram only"),
        ("name: a, source: request_duration, buckets: [2, 1]", r"buckets = \[2.0, 1.0\]: wanted"),
        ("name: a, source: request_duration, buckets: [1, .inf]", "wanted ascending bounds"),
        ("name: a, source: request_duration, buckets: [.nan]", "wanted ascending bounds"),
        ("name: a, type: summary", "one of: counter, gauge, histogram"),
        ("name: Ä, source: gpu_utilization", "names have a-z"),
        ("name: dynamo_info, source: gpu_utilization", "that begin with dynamo_ are taken"),
        ("name: a, source: gpu_utilization}, {name: a, source: cache_hit_ratio", "two metrics"),
    ],
)
def test_custom_metrics_have_a_source_of_their_kind(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(f"monitoring: {{custom_metrics: [{{{entry}}}]}}")
    if "no source" in message:
        for source in ("request_duration", "cache_hit_ratio", "gpu_utilization"):
            assert source in caught.value.hint


def test_servers_have_short_names_in_the_environment() -> None:
    loaded = resolve_settings(
        environ={"DYNAMO_ETCD_ENDPOINTS": "http://a,http://b", "DYNAMO_NATS_URL": "nats://c"}
    )

    assert loaded.settings.discovery.etcd.endpoints == ("http://a", "http://b")
    assert loaded.settings.messaging.nats.servers == ("nats://c",)


def test_every_setting_is_explained_and_secrets_are_redacted() -> None:
    loaded = read("server: {api_keys: [s3cret], port: 1}")
    rows = {row.key: row for row in effective_settings(loaded)}

    assert rows["server.api_keys"].value == "***"
    assert rows["server.http_port"].origin == "f.yaml:1"
    assert rows["server.idle_timeout"].unit == "seconds"
    assert rows["monitoring.grafana.port"].note == "not in use yet"


def test_the_json_schema_has_every_spelling() -> None:
    root: Any = json_schema()
    sections = root["properties"]

    assert sections["server"]["properties"]["port"]["description"].startswith(
        "same as server.http_port"
    )
    assert sections["kv_cache"]["properties"]["max_cache_size"]["type"] == ["integer", "string"]
    assert sections["distributed_runtime"]["properties"]["nats"]["properties"]["servers"]
    assert "tensor_parallel_size" in sections["decode_workers"]["items"]["properties"]
    resources = sections["workers"]["properties"]["decode"]["properties"]["resources"]
    assert "nvidia.com/gpu" in resources["properties"]
    assert sections["server"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("cache: {cpu_size: 4GB}", ("host",)),
        ("cache: {ssd_size: 20GB, ssd_path: /kv}", ("disk",)),
        ("cache: {enable_offloading: true}", ("host",)),
        ("cache: {enable_offloading: true, offload_targets: [ssd, cpu]}", ("host", "disk")),
        ("cache: {offload_targets: [cpu, ssd]}", ()),
        ("kv_cache: {remote_url: s3://b/p, host_size: 1Gi}", ("host", "shared")),
    ],
)
def test_the_tiers_of_kv_blocks_follow_from_sizes_and_targets(
    text: str, tiers: tuple[str, ...]
) -> None:
    assert read(text).settings.cache.tiers == tiers


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("cache: {offload_targets: [gpu]}", "'gpu' in cache.offload_targets (f.yaml:1)", "ssd"),
        ("cache: {ssd_path: /kv}", "cache.ssd_path (f.yaml:1) is set", "--kv-disk-size"),
        ("cache: {remote_size: 9GB}", "cache.remote_size (f.yaml:1) is set", "--kv-remote-url"),
        (
            "cache: {enable_offloading: true, offload_targets: [remote]}",
            "cache.remote_url is not set",
            "--kv-remote-url",
        ),
    ],
)
def test_a_tier_without_a_place_is_an_error(text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)

    assert message in caught.value.message
    assert hint in caught.value.hint
