"""Decoding of JSON bodies, with errors that name the field."""

from __future__ import annotations

import gc
import re
from typing import TypeVar

import msgspec

from dynamo.communication.http import LARGE_BODY_BYTES, Request
from dynamo.core.errors import InvalidRequest, UnsupportedMediaType

T = TypeVar("T")
JSON_CONTENT_TYPE = b"application/json"
_FIELD_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`\Z")
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`")


def decode_body(decoder: msgspec.json.Decoder[T], request: Request) -> T:
    """Return the body as the decoder's type, and drop it. Raises `InvalidRequest`.

    A large body must have passed `LargeBodies.check`. It counts in the budget until its prompts are
    encoded, because the decoded values are larger.
    """
    body = request.body
    if request.headers.get(b"content-type") != JSON_CONTENT_TYPE:
        _check_content_type(request)
    if b"content-encoding" in request.headers:
        _check_content_encoding(request.header(b"content-encoding"))
    if not body:
        raise InvalidRequest("the body is empty", hint="send a JSON object")
    try:
        if len(body) > LARGE_BODY_BYTES:
            return _decode_large(decoder, body)
        if not body.isascii():
            body.decode()  # the JSON decoder does not validate text in skipped fields
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field_error(str(error)) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    finally:
        request.body, request.decoded_body = b"", body
        if request.hold is not None and len(body) <= LARGE_BODY_BYTES:
            request.hold.release()


def _decode_large(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decode without the garbage collector, which would visit all new objects several times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return decoder.decode(body)
    finally:
        if enabled:
            gc.enable()


def _check_content_type(request: Request) -> None:
    """Refuse what an HTML form can send. A web page that sends JSON is asked about by a preflight.

    Programs without an `Origin` may omit the content type or send another one, as `curl -d` does.
    """
    content_type = (request.header(b"content-type") or "").partition(";")[0].strip().lower()
    of_page = b"origin" in request.headers or b"sec-fetch-site" in request.headers
    if content_type == "multipart/form-data" or (of_page and content_type != "application/json"):
        raise UnsupportedMediaType(
            f"the content type is {content_type[:100]!r}",
            hint="send content-type: application/json",
        )


def _check_content_encoding(coding: str | None) -> None:
    if coding and coding != "identity":
        raise UnsupportedMediaType(
            f"content-encoding {coding[:100]!r} is not supported", hint="send the body uncompressed"
        )


def invalid_field_error(message: str) -> InvalidRequest:
    """Return an error for a message of msgspec: the field first, then the expectation."""
    suffix = _FIELD_PATH.search(message)
    reason = message[: suffix.start()] if suffix else message
    path = suffix[1].removesuffix("[...]") if suffix else ""
    missing = _MISSING_FIELD.search(reason)
    if missing:
        field = f"{path}.{missing[1]}".lstrip(".")
        return InvalidRequest("required, but missing", field=field)
    reason = reason[:1].lower() + reason[1:].replace("`", "").replace(" | null", "")
    return InvalidRequest(f"{path or 'the body'}: {reason}", param=path or None)
