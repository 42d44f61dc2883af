"""Cards are given out over all groups of workers, and each worker has its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.unit.services.test_model_groups import load

from dynamo.core.errors import ConfigError
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.services.deployment import accelerators
from dynamo.services.deployment.accelerators import (
    assign_cards,
    cards_needed,
    find_cards,
    keep_cards,
)
from dynamo.services.deployment.launch import deployment_specs

EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The cards that other deployments hold."""
    others: dict[str, str] = {}
    monkeypatch.setattr(accelerators, "cards_of_others", lambda: others)
    return others


def specs_of(text: str, kind: str = "vllm") -> list[ChildSpec]:
    return deployment_specs(load({"engine.kind": kind}, text).settings)


def assign(text: str, environ: dict[str, str] = EIGHT, kind: str = "vllm") -> dict[str, str]:
    specs = assign_cards(specs_of(text, kind), environ)
    return {spec.name: ",".join(spec.cards) for spec in specs if spec.cards}


def test_workers_without_a_list_share_no_card(caplog: pytest.LogCaptureFixture) -> None:
    text = "engine: {workers: 4, tensor_parallel_size: 2}"
    assert list(assign(text).values()) == ["0,1", "2,3", "4,5", "6,7"]
    with caplog.at_level(logging.INFO):
        assert list(assign(text.replace("4", "3")).values()) == ["0,1", "2,3", "4,5"]
    assert caplog.records[-1].fields == {"cards": "6,7"}  # type: ignore[attr-defined]


def test_groups_with_one_list_get_different_cards() -> None:
    text = """\
engine: {workers: 0, device_ids: [0, 1, 2, 3, 4, 5, 6, 7]}
prefill_workers: [{replicas: 3, tensor_parallel_size: 1}]
decode_workers: [{replicas: 2, tensor_parallel_size: 2}]
"""
    cards = assign(text, {})
    assert list(cards.values()) == ["0", "1", "2", "3,4", "5,6"]


def test_groups_with_lists_come_first() -> None:
    text = """\
engine: {workers: 2}
decode_workers: [{replicas: 1, tensor_parallel_size: 2, device_ids: [0, 1]}]
"""
    assert assign(text) == {"decode-worker": "0,1", "worker-1": "2", "worker-2": "3"}


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("4,5", ["4", "5"]),
        ("GPU-8932f937, GPU-4cf83dd1", ["GPU-8932f937", "GPU-4cf83dd1"]),
        ("MIG-a/1/0,MIG-b", ["MIG-a/1/0", "MIG-b"]),
        ("3,-1,4", ["3"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_visible_cards_are_respected(visible: str, names: list[str]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    assert find_cards(environ) == names
    if len(names) == 2:
        assert list(assign("engine: {workers: 2}", environ).values()) == names
    if len(names) == 2 and not names[0].isdecimal():
        cards = assign("engine: {workers: 1, device_ids: [1]}", environ)
        assert cards == {"worker": names[1]}
    if names[:1] == ["4"]:
        with pytest.raises(ConfigError, match="names the cards 0"):
            assign("engine: {workers: 1, device_ids: [0]}", environ)
    if not names:
        with pytest.raises(ConfigError, match="need 1 cards and 0 are free"):
            assign("engine: {workers: 1}", environ)


def test_too_few_cards_are_refused_with_their_holders(held: dict[str, str]) -> None:
    held["1"] = "worker of http-8000"
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    text = "engine: {workers: 2, tensor_parallel_size: 2}"
    with pytest.raises(ConfigError, match=r"need 4 cards and 3 are free.*card 1 is held by worker"):
        assign(text, environ)
    assert list(assign("engine: {workers: 3}", environ).values()) == ["0", "2", "3"]
    with pytest.raises(ConfigError, match="need 4 cards and 3 are listed"):
        assign(f"{text[:-1]}, device_ids: [0, 2, 3]}}", environ)


def test_a_card_that_is_listed_twice_is_shared() -> None:
    cards = assign("engine: {workers: 2, device_ids: [1, 1]}")
    assert list(cards.values()) == ["1", "1"]


@pytest.mark.parametrize("kind", ["mock", "echo", "native"])
def test_engines_on_the_cpu_take_none(kind: str) -> None:
    assert assign("engine: {workers: 9, tensor_parallel_size: 1}", EIGHT, kind) == {}


def test_native_workers_on_cards_take_one_each() -> None:
    cards = assign("engine: {workers: 2, device: cuda, data_parallel_size: 2}", EIGHT, "native")
    assert sorted(cards.values()) == ["0", "1"]
    assert assign("engine: {workers: 2, device: cpu}", EIGHT, "native") == {}


def test_a_host_without_cards_assigns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "find_cards", lambda _: None)
    assert assign("engine: {workers: 2}", {}) == {}


def test_arguments_of_the_engine_count() -> None:
    sizes: list[tuple[str, dict[str, Any], int]] = [
        ("vllm", {"tensor_parallel_size": 4}, 8),
        ("sglang", {"tp_size": 3}, 6),
        ("vllm", {"device": "cpu"}, 0),
    ]
    for kind, args, needed in sizes:
        settings = load(
            {"engine.kind": kind, "engine.args": args, "engine.pipeline_parallel_size": 2}
        ).settings
        assert cards_needed(settings) == needed


def test_reloaded_settings_keep_the_cards_of_each_process() -> None:
    specs = specs_of("engine: {workers: 2, device_ids: [5, 6]}")
    started = assign_cards(specs, EIGHT)
    again = keep_cards(specs, started)
    assert [(spec.name, spec.cards) for spec in again] == [
        (spec.name, spec.cards) for spec in started
    ]
    assert not any(spec.settings.engine.device_ids for spec in again if spec.cards)
