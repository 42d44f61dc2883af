"""Declaration of services: decorators, graphs and configuration."""

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


def test_walk_returns_all_reachable_services_callers_first() -> None:
    order = [service.__name__ for service in walk(Root)]

    assert order[0] == "Root"
    assert order[-1] == "Leaf"
    assert sorted(order) == ["Leaf", "Left", "Right", "Root"]


def test_link_returns_the_linked_service_and_counts_once() -> None:
    assert Root.link(Right) is Right  # type: ignore[attr-defined]
    assert spec_of(Root).links == [Right]


def test_two_services_of_one_name_are_refused() -> None:
    other = service()(type("Leaf", (), {"__module__": "elsewhere"}))
    root = service()(type("Both", (), {"one": depends(Leaf), "other": depends(other)}))

    with pytest.raises(ConfigError, match="two services of this graph are called 'Leaf'"):
        walk(root)


def test_a_cycle_is_allowed() -> None:
    first = service()(type("First", (), {}))
    second = service()(type("Second", (), {"first": depends(first)}))
    first.link(second)

    assert set(walk(first)) == {first, second}


def test_a_spec_has_the_declared_values() -> None:
    spec = spec_of(Root)

    assert (spec.name, spec.namespace, spec.workers, spec.resources) == ("Root", "n", 3, {"gpu": 1})
    assert spec.dependencies == {"left": Left}
    assert spec_of(Leaf).endpoints["ask"].name == "ask"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: service(dynamo={"namespce": "x"}), "did you mean 'namespace'"),
        (lambda: service(workers=0), "at least 1"),
        (lambda: dynamo_endpoint(lambda self: None), "parentheses"),  # type: ignore[arg-type]
        (lambda: dynamo_endpoint()(lambda self, request: None), "not asynchronous"),
        (lambda: depends(int), "put @service(...) above class int"),
    ],
)
def test_a_wrong_declaration_is_refused(declare: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        declare()

    assert message in f"{caught.value.message} {caught.value.hint}"


def test_an_endpoint_takes_at_most_one_request() -> None:
    async def method(self: Any, first: Any, second: Any) -> None: ...

    with pytest.raises(ConfigError, match="at most one request"):
        dynamo_endpoint()(method)


def test_unsupported_types_are_refused() -> None:
    @dynamo_endpoint()
    async def method(self: Any, request: type[int] | complex) -> None: ...

    with pytest.raises(ConfigError, match="cannot cross the wire"):
        request_decoder(method.__dynamo_endpoint__)  # type: ignore[attr-defined]


def test_answers_are_decoded_to_the_annotated_type() -> None:
    decode = response_decoder(spec_of(Leaf).endpoints["ask"])

    assert decode(msgspec.msgpack.encode(["a"])) == ["a"]
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode([1]))


class Inner(msgspec.Struct, frozen=True):
    depth: int = 1


class CustomConfig(msgspec.Struct):
    top: int
    rate: float = 1.0
    inner: Inner = Inner()
    names: list[str] = []


@service()
class Configured:
    config: CustomConfig


def test_configuration_is_converted_to_its_type() -> None:
    section = {"top": "3", "rate": "0.5", "inner": {"depth": "2"}, "ServiceArgs": {"workers": 2}}

    assert build_config(Configured, section) == CustomConfig(3, 0.5, Inner(2))
    assert parse_service_args(Configured, section).workers == 2
    assert build_config(Leaf, {"any": 1, "ServiceArgs": {}}) == {"any": 1}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"top": 1, "rat": 2}, "unknown key 'rat'"),
        ({"top": 1, "inner": {"dept": 2}}, r"Configured.inner: unknown key 'dept'"),
        ({}, "missing required field `top`"),
        ({"top": "many"}, r"top"),
    ],
)
def test_wrong_configuration_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(Configured, section)


def test_the_wrong_service_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Configured\.ServiceArgs\.workers: Expected `int"):
        parse_service_args(Configured, {"ServiceArgs": {"workers": "many"}})


@pytest.mark.parametrize("args", [{"workers": 0}, {"worker": 1}, {"workers": "many"}])
def test_wrong_service_arguments_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Configured.ServiceArgs"):
        parse_service_args(Configured, {"ServiceArgs": args})


def test_short_names_of_service_args() -> None:
    assert qualify_key(Configured, "workers") == "ServiceArgs.workers"
    assert qualify_key(Configured, "resources.gpu") == "ServiceArgs.resources.gpu"
    assert qualify_key(Configured, "top") == "top"


def test_a_model_needs_a_chat() -> None:
    mute = service(dynamo={"model": "mute"})(type("Mute", (), {}))

    with pytest.raises(ConfigError, match="without an endpoint 'chat'"):
        ServiceModelRecord.from_service(mute, "n")


def test_declarations_of_nvidia_dynamo_are_accepted_or_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"enabled": True, "namespace": "shop"}
    declared = service(dynamo=options, image="my/image", traffic={"timeout": 60})
    assert spec_of(declared(type("Shop", (), {}))).namespace == "shop"
    assert "traffic" in caplog.text
    with pytest.raises(ConfigError, match="enabled"):
        service(dynamo={"enabled": False})
    with pytest.raises(ConfigError, match="is_api"):
        dynamo_endpoint(is_api=True)
