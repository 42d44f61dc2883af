"""Encoding of requests and answers as msgpack, of plain values or the annotated types."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ConfigError, InvalidRequest
from dynamo.sdk.decorators import EndpointSpec


def _to_builtins(value: Any) -> Any:
    """Return the fields of a pydantic model. Raises `TypeError` for other objects."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"objects of type {type(value).__name__} cannot cross the wire")


encode = msgspec.msgpack.Encoder(enc_hook=_to_builtins).encode
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


def _from_builtins(kind: Any, value: Any) -> Any:
    """Return a pydantic model made of its fields. Raises `ValidationError`."""
    try:
        return kind.model_validate(value)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None


def _build_decoder(endpoint: EndpointSpec, kind: Any) -> msgspec.msgpack.Decoder[Any]:
    try:
        hook = _from_builtins if hasattr(kind, "model_validate") else None
        return msgspec.msgpack.Decoder(kind, dec_hook=hook)
    except TypeError as error:
        raise ConfigError(
            f"{endpoint.function.__qualname__}: {kind} cannot cross the wire: {error}",
            hint="annotate it as dict, a msgspec.Struct or a pydantic model, or not at all",
        ) from None
