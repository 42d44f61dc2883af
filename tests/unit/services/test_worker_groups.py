"""Groups of workers in settings, and the processes that they become."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import SourcedValue
from dynamo.core.settings.load import LoadedSettings, resolve_settings
from dynamo.services.deployment.launch import deployment_specs


def load(flags: dict[str, object], text: str = "version: 1\n") -> LoadedSettings:
    values = {key: SourcedValue(value, f"flag {key}") for key, value in flags.items()}
    return resolve_settings(values, document=(text, "a.yaml"))


def processes(loaded: LoadedSettings) -> list[tuple[str, str, int]]:
    specs = deployment_specs(loaded.settings)
    engines = [(spec.name, spec.settings.engine) for spec in specs if spec.role == "worker"]
    return [(name, engine.role, engine.max_num_seqs) for name, engine in engines]


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


def test_the_strongest_source_counts_the_workers() -> None:
    text = "workers: {prefill: {replicas: 4}, decode: {replicas: 8}}\n"

    assert [name for name, _, _ in processes(load({"engine.workers": 1}, text))] == ["worker"]


def test_flexible_workers_have_both_roles_and_their_mode() -> None:
    loaded = load({"workers.flexible": 2})

    assert processes(loaded) == [("worker-1", "both", 0), ("worker-2", "both", 0)]
    assert loaded.settings.router.disaggregation.mode == "flexible"


def test_prefill_workers_alone_are_refused_with_the_flag_that_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        deployment_specs(load({"workers.prefill.replicas": 2}).settings)
    assert "--decode-workers" in caught.value.hint
