"""Typed errors. The wire carries them by `code`; one place translates them to HTTP.

Programs test `code`. The message states what happened and why, `hint` what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import msgspec

from dynamo.core.redaction import redact

CANCELLED = "cancelled"
"""The code of a request whose reader wanted no more."""


class DynamoError(Exception):
    """Base of every error that a user may see. Message and hint show no secret of this process.

    `field` is the path of the wrong value in a request, e.g. "tools[0].type": the message begins
    with it, and the rest is the `reason`. `param`, the wrong field or setting in short, is the same
    unless it is given.

    A subclass sets its `code` and `retryable` in the class statement, or inherits them.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, code: str | None = None, retryable: bool | None = None) -> None:
        cls.code = cls.code if code is None else code
        cls.retryable = cls.retryable if retryable is None else retryable

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        field: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.reason = redact(message)
        super().__init__(self.reason)
        self.hint = redact(hint) if hint else hint
        self.field = field
        self.param = param or field or None
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """The field, if one is wrong, and the reason."""
        return f"{self.field}: {self.reason}" if self.field else self.reason

    def rename_fields(self, rename: Callable[[str], str]) -> None:
        """Name the wrong field as another request has it."""
        self.field = rename(self.field)
        self.param = rename(self.param) if self.param else None


class InternalError(DynamoError):
    """A bug in Dynamo."""


class InvalidRequest(DynamoError, code="invalid_request"):
    """The request is wrong. The same request will fail again."""


class UnsupportedMediaType(InvalidRequest, code="unsupported_media_type"):
    """The body's content type is not application/json."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """Prompt and answer do not fit the model's context."""


class SchemaTooComplex(InvalidRequest, code="schema_too_complex"):
    """The structured output takes too long to enforce, or cannot be enforced any more."""


class ModelNotFound(DynamoError, code="model_not_found"):
    """No model of this name is served."""


class NotFound(DynamoError, code="not_found"):
    """The route, endpoint or file does not exist."""


class PreviousResponseNotFound(NotFound, code="previous_response_not_found"):
    """The response that a request continues is not stored, or belongs to another API key."""


class MethodNotAllowed(DynamoError, code="method_not_allowed"):
    """The route exists, the method does not."""


class TooLarge(DynamoError, code="request_too_large"):
    """A body, a header or a frame exceeds its limit."""


class RequestTooSlow(DynamoError, code="request_timeout"):
    """The client did not send its request in time."""


class Unauthorized(DynamoError, code="invalid_api_key"):
    """The API key is missing or wrong."""


class Forbidden(DynamoError, code="forbidden"):
    """This caller may not do this: an API key, a web page, or a foreign host name."""


class ModelNotReady(DynamoError, code="model_not_ready", retryable=True):
    """The model is still being prepared."""


class NoWorkers(DynamoError, code="no_workers", retryable=True):
    """No instance of the endpoint can take a request now."""


class Overloaded(DynamoError, code="overloaded", retryable=True):
    """Admission rejected the request before any work was done."""


class WorkerFailed(DynamoError, code="worker_failed", retryable=True):
    """The instance died, lost its connection or failed during the request."""

    instance: str = ""
    """The instance id, empty where unknown. A decode worker names its prefill worker."""
    rank: int | None = None
    """The data-parallel rank of the request, if the router chose one."""


class InstanceGone(WorkerFailed, code="instance_gone"):
    """The addressed instance no longer exists; its address belongs to another process."""


class WorkerDraining(WorkerFailed, code="worker_leaving"):
    """The instance is draining. Another instance continues the request."""


class ServerStopped(DynamoError, code="server_stopped", retryable=True):
    """The server's drain time ended before the answer was complete."""


class UpstreamFailed(WorkerFailed, code="upstream_failed"):
    """The server behind a worker's URL cannot be reached, broke off or failed. The worker lives."""


class MalformedAnswer(UpstreamFailed, code="malformed_answer"):
    """The server behind a worker's URL sent what is no answer to the request."""


TransferFailure = Literal["stale", "checksum", "gone", "timeout", "refused"]


class TransferFailed(DynamoError, code="transfer_failed", retryable=True):
    """KV blocks of a peer could not be pulled. The receiver computes them itself.

    `reason`: "stale" (the peer reused a block), "checksum", "gone" (the peer died or the connection
    broke), "timeout", or "refused" (secret, layout, or the peer is not asked after failures).
    """

    reason: TransferFailure

    def __init__(self, message: str, **named: Any) -> None:
        super().__init__(message, **named)
        self.reason = "gone"

    @property
    def message(self) -> str:
        """The text that the error was made with."""
        return str(self.args[0])

    @classmethod
    def of(cls, reason: TransferFailure, message: str, hint: str = "") -> TransferFailed:
        """Make an error with its reason."""
        error = cls(message, hint=hint)
        error.reason = reason
        return error


class PlaneUnavailable(DynamoError, code="plane_away", retryable=True):
    """A server of a plane (etcd, NATS) cannot be reached now."""


class StoreUnavailable(DynamoError, code="store_unavailable", retryable=True):
    """The file of stored responses cannot be read or written."""


class PoisonedRequest(DynamoError, code="poisoned_request"):
    """The request made several workers fail."""


class DeadlineExceeded(DynamoError, code="deadline_exceeded"):
    """The request's deadline passed."""


class SlowReader(DynamoError, code="slow_reader"):
    """The client read its stream too slowly and exceeded the backlog."""


class Unsupported(InvalidRequest, code="unsupported"):
    """The feature is known and not supported (yet)."""


class ProtocolError(DynamoError, code="protocol_error"):
    """A peer violated the protocol."""


class ConfigError(DynamoError, code="config_error"):
    """A setting, flag or file is wrong. The command line exits with 2."""


class ModelUnavailable(DynamoError, code="model_unavailable"):
    """The model's files cannot be read or fetched."""


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wire form of an error."""

    code: str
    message: str
    hint: str = ""
    param: str | None = None
    retry_after_s: float | None = None
    instance: str = ""
    field: str = ""


def describe_os_error(error: OSError) -> str:
    """Return "FILE: REASON", or the reason alone where no file is known."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes of a peer. Deeply nested values raise `RecursionError`."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ErrorRecord)


def error_types() -> dict[str, type[DynamoError]]:
    """Return every error class by its code."""
    return _classes_by_code(DynamoError) | {InternalError.code: InternalError}


def _classes_by_code(base: type[DynamoError]) -> dict[str, type[DynamoError]]:
    classes: dict[str, type[DynamoError]] = {}
    for subclass in base.__subclasses__():
        classes = _classes_by_code(subclass) | classes
    return classes | {base.code: base}


def encode_error(error: DynamoError) -> bytes:
    """Encode an error as msgpack."""
    instance = error.instance if isinstance(error, WorkerFailed) else ""
    return _encoder.encode(
        ErrorRecord(
            error.code,
            error.message,
            error.hint,
            error.param,
            error.retry_after_s,
            instance,
            error.field,
        )
    )


def decode_error(payload: bytes | memoryview) -> DynamoError:
    """Decode the result of `encode_error`. An unknown code becomes `InternalError`."""
    record = _decoder.decode(payload)
    cls = error_types().get(record.code, InternalError)
    error = cls(
        record.message.removeprefix(f"{record.field}: "),
        hint=record.hint,
        field=record.field,
        param=record.param,
        retry_after_s=record.retry_after_s,
    )
    if isinstance(error, WorkerFailed):
        error.instance = record.instance
    return error


def error_code(error: BaseException) -> str:
    """Return the code of how a request ended, which may be `CANCELLED`."""
    if isinstance(error, DynamoError):
        return error.code
    from asyncio import CancelledError

    return CANCELLED if isinstance(error, CancelledError) else InternalError.code


def nearest_name_hint(
    wrong: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6
) -> str:
    """Return a hint with the name in `known` nearest to a wrong one. Without one at least as
    similar as `cutoff` (0 to 1) return `otherwise`, by default a list of all names."""
    import difflib

    names = list(known)
    if near := difflib.get_close_matches(wrong, names, n=1, cutoff=cutoff):
        return f"did you mean {near[0]!r}?"
    return otherwise or (f"known: {', '.join(names)}" if names else "there are none")
