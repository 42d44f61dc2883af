"""Encoding of requests and answers as msgpack, of plain values or the annotated types."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ConfigError, InvalidRequest
from dynamo.sdk.decorators import EndpointSpec

encode = msgspec.msgpack.Encoder().encode
DecodeMessage = Callable[[bytes], Any]
STREAM_TYPES = (AsyncGenerator, AsyncIterator)


def request_decoder(endpoint: EndpointSpec) -> DecodeMessage | None:
    """Return a decoder for the annotated type of the request; None if the endpoint takes none.

    The decoder raises `InvalidRequest`.
    """
    import inspect

    names = list(inspect.signature(endpoint.function).parameters)[1:]
    if not names:
        return None
    decode_msgpack = _build_decoder(endpoint, _type_hints(endpoint).get(names[0], Any)).decode

    def decode(payload: bytes) -> Any:
        try:
            return decode_msgpack(payload)
        except DECODE_ERRORS as error:
            raise InvalidRequest(f"{endpoint.function.__qualname__}: {error}") from None

    return decode


def response_decoder(endpoint: EndpointSpec) -> DecodeMessage:
    """Return a decoder for the annotated return type: of an answer, or of an item of a stream."""
    kind = _type_hints(endpoint).get("return", Any)
    if endpoint.streams:
        kind = get_args(kind)[0] if get_origin(kind) in STREAM_TYPES else Any
    return _build_decoder(endpoint, kind).decode


def _type_hints(endpoint: EndpointSpec) -> dict[str, Any]:
    try:
        return get_type_hints(endpoint.function)
    except NameError as error:
        raise ConfigError(
            f"{endpoint.function.__qualname__}: {error}",
            hint="an endpoint's types must be importable when it runs, not only for type checkers",
        ) from None


def _build_decoder(endpoint: EndpointSpec, kind: Any) -> msgspec.msgpack.Decoder[Any]:
    try:
        return msgspec.msgpack.Decoder(kind)
    except TypeError as error:
        raise ConfigError(
            f"{endpoint.function.__qualname__}: {kind} cannot cross the wire: {error}",
            hint="annotate it as dict or as a msgspec.Struct, or not at all",
        ) from None
