"""Requests and answers as bytes: msgpack of plain values, or of the types that are annotated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from dynamo.core.errors import ConfigError, InvalidRequest
from dynamo.sdk.declare import EndpointSpec

encode = msgspec.msgpack.Encoder().encode
Decode = Callable[[bytes], Any]
STREAMS = (AsyncGenerator, AsyncIterator)


def request_decoder(endpoint: EndpointSpec) -> Decode | None:
    """What reads a request, by the annotation of the endpoint's parameter; None: it takes none.
    The decoder raises `InvalidRequest`."""
    names = list(_parameters(endpoint))
    if not names:
        return None
    read = _decoder(endpoint, _hints(endpoint).get(names[0], Any)).decode

    def decode(payload: bytes) -> Any:
        try:
            return read(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{endpoint.function.__qualname__}: {error}") from None

    return decode


def answer_decoder(endpoint: EndpointSpec) -> Decode:
    """What reads an answer, or an item of one, by the annotation of what the endpoint returns."""
    kind = _hints(endpoint).get("return", Any)
    if endpoint.streams:
        kind = get_args(kind)[0] if get_origin(kind) in STREAMS else Any
    return _decoder(endpoint, kind).decode


def _parameters(endpoint: EndpointSpec) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(endpoint.function).parameters)[1:]


def _hints(endpoint: EndpointSpec) -> dict[str, Any]:
    try:
        return get_type_hints(endpoint.function)
    except NameError as error:
        raise ConfigError(
            f"{endpoint.function.__qualname__}: {error}",
            hint="an endpoint's types must be importable when it runs, not only for type checkers",
        ) from None


def _decoder(endpoint: EndpointSpec, kind: Any) -> msgspec.msgpack.Decoder[Any]:
    try:
        return msgspec.msgpack.Decoder(kind)
    except TypeError as error:
        raise ConfigError(
            f"{endpoint.function.__qualname__}: {kind} cannot cross the wire: {error}",
            hint="annotate it as dict or as a msgspec.Struct, or not at all",
        ) from None
