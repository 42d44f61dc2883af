"""From a body's bytes to a typed value, with errors that name the field."""

from __future__ import annotations

import re
from typing import Protocol, TypeVar

import msgspec

from dynamo.communication.http import Request
from dynamo.core.errors import InvalidRequest

T_co = TypeVar("T_co", covariant=True)
_FIELD_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`\Z")
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")


class BodyDecoder(Protocol[T_co]):
    """`msgspec.json.Decoder`."""

    def decode(self, buf: bytes, /) -> T_co:
        """Raises msgspec.DecodeError."""


def decode_body(decoder: BodyDecoder[T_co], request: Request) -> T_co:
    """The body as the decoder's type. Raises `InvalidRequest`."""
    body = request.body
    if b"content-encoding" in request.headers:
        _check_content_encoding(request.header(b"content-encoding"))
    if not body:
        raise InvalidRequest("the body is empty", hint="send a JSON object")
    try:
        if not body.isascii():
            body.decode()  # skipped fields are not looked into by the JSON decoder
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field_error(str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def _check_content_encoding(coding: str | None) -> None:
    if coding and coding != "identity":
        raise InvalidRequest(f"content-encoding {coding!r} is not supported")


def invalid_field_error(told: str) -> InvalidRequest:
    """msgspec's message, turned round: the field first, then what was expected."""
    at = _FIELD_PATH.search(told)
    said = told[: at.start()] if at else told
    path = at[1] if at else ""
    missing = _MISSING_FIELD.search(said)
    if missing:
        field = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest(f"{field}: required, and missing", param=field)
    said = said[:1].lower() + said[1:].replace("`", "").replace(" | null", "")
    return InvalidRequest(f"{path or 'the body'}: {said}", param=path or None)
