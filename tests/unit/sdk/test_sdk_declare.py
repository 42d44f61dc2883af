"""What decorators refuse, and what graphs and configurations come to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo.core.errors import ConfigError
from dynamo.sdk import depends, dynamo_endpoint, service, walk
from dynamo.sdk.configuration import build_config, parse_service_args, qualify_key
from dynamo.sdk.decorators import spec_of
from dynamo.sdk.serialization import request_decoder, response_decoder
from dynamo.sdk.service_model import ServiceModelRecord


@service()
class Leaf:
    @dynamo_endpoint()
    async def ask(self, request: dict[str, int]) -> list[str]:
        return []


@service()
class Left:
    leaf = depends(Leaf)


@service()
class Right:
    leaf = depends(Leaf)


@service(dynamo={"namespace": "n"}, workers=3, resources={"gpu": 1})
class Root:
    left = depends(Left)


Root.link(Right)  # type: ignore[attr-defined]


def test_a_graph_is_all_that_is_reached_callers_first() -> None:
    order = [one.__name__ for one in walk(Root)]

    assert order[0] == "Root"
    assert order[-1] == "Leaf"
    assert sorted(order) == ["Leaf", "Left", "Right", "Root"]


def test_a_link_answers_the_linked_and_counts_once() -> None:
    assert Root.link(Right) is Right  # type: ignore[attr-defined]
    assert spec_of(Root).links == [Right]


def test_two_services_of_one_name_are_told_apart() -> None:
    other = service()(type("Leaf", (), {"__module__": "elsewhere"}))
    root = service()(type("Both", (), {"one": depends(Leaf), "other": depends(other)}))

    with pytest.raises(ConfigError, match="two services of this graph are called 'Leaf'"):
        walk(root)


def test_a_circle_ends() -> None:
    first = service()(type("First", (), {}))
    second = service()(type("Second", (), {"first": depends(first)}))
    first.link(second)

    assert set(walk(first)) == {first, second}


def test_what_a_spec_says() -> None:
    spec = spec_of(Root)

    assert (spec.name, spec.namespace, spec.workers, spec.resources) == ("Root", "n", 3, {"gpu": 1})
    assert spec.dependencies == {"left": Left}
    assert spec_of(Leaf).endpoints["ask"].name == "ask"


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: service(dynamo={"namespce": "x"}), "did you mean 'namespace'"),
        (lambda: service(workers=0), "at least 1"),
        (lambda: dynamo_endpoint(lambda self: None), "parentheses"),  # type: ignore[arg-type]
        (lambda: dynamo_endpoint()(lambda self, request: None), "not asynchronous"),
        (lambda: depends(int), "put @service(...) above class int"),
    ],
)
def test_a_wrong_declaration_is_told(declare: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        declare()

    assert told in f"{caught.value.message} {caught.value.hint}"


def test_two_parameters_are_too_many() -> None:
    async def method(self: Any, one: Any, two: Any) -> None: ...

    with pytest.raises(ConfigError, match="at most one request"):
        dynamo_endpoint()(method)


def test_types_that_cannot_cross_the_wire_are_told() -> None:
    @dynamo_endpoint()
    async def method(self: Any, request: type[int] | complex) -> None: ...

    with pytest.raises(ConfigError, match="cannot cross the wire"):
        request_decoder(method.__dynamo_endpoint__)  # type: ignore[attr-defined]


def test_answers_keep_their_type() -> None:
    decode = response_decoder(spec_of(Leaf).endpoints["ask"])

    assert decode(msgspec.msgpack.encode(["a"])) == ["a"]
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode([1]))


class Inner(msgspec.Struct, frozen=True):
    depth: int = 1


class Wanted(msgspec.Struct):
    top: int
    rate: float = 1.0
    inner: Inner = Inner()
    names: list[str] = []


@service()
class Configured:
    config: Wanted


def test_configuration_takes_its_type() -> None:
    section = {"top": "3", "rate": "0.5", "inner": {"depth": "2"}, "ServiceArgs": {"workers": 2}}

    assert build_config(Configured, section) == Wanted(3, 0.5, Inner(2))
    assert parse_service_args(Configured, section).workers == 2
    assert build_config(Leaf, {"any": 1, "ServiceArgs": {}}) == {"any": 1}


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"top": 1, "rat": 2}, "unknown key 'rat'"),
        ({"top": 1, "inner": {"dept": 2}}, r"Configured.inner: unknown key 'dept'"),
        ({}, "missing required field `top`"),
        ({"top": "many"}, r"top"),
    ],
)
def test_wrong_configuration_is_told(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_config(Configured, section)


def test_the_wrong_service_arg_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Configured\.ServiceArgs\.workers: Expected `int"):
        parse_service_args(Configured, {"ServiceArgs": {"workers": "many"}})


@pytest.mark.parametrize("args", [{"workers": 0}, {"worker": 1}, {"workers": "many"}])
def test_wrong_service_args_are_told(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Configured.ServiceArgs"):
        parse_service_args(Configured, {"ServiceArgs": args})


def test_short_names_of_service_args() -> None:
    assert qualify_key(Configured, "workers") == "ServiceArgs.workers"
    assert qualify_key(Configured, "resources.gpu") == "ServiceArgs.resources.gpu"
    assert qualify_key(Configured, "top") == "top"


def test_a_model_needs_a_chat() -> None:
    mute = service(dynamo={"model": "mute"})(type("Mute", (), {}))

    with pytest.raises(ConfigError, match="no endpoint 'chat'"):
        ServiceModelRecord.from_service(mute, "n")
