"""Typed errors. The wire carries them by `code`; one place translates them to HTTP.

Programs test `code`. The message states what happened and why, `hint` what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class DynamoError(Exception):
    """Base of every error that a user may see. `param` names the wrong field or setting."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.retry_after_s = retry_after_s


class InternalError(DynamoError):
    """A bug in Dynamo."""


class InvalidRequest(DynamoError):
    """The request is wrong. The same request will fail again."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(DynamoError):
    """No model of this name is served."""

    code = "model_not_found"


class NotFound(DynamoError):
    """The route, endpoint or file does not exist."""

    code = "not_found"


class MethodNotAllowed(DynamoError):
    """The route exists, the method does not."""

    code = "method_not_allowed"


class TooLarge(DynamoError):
    """A body, a header or a frame exceeds its limit."""

    code = "request_too_large"


class RequestTooSlow(DynamoError):
    """The client did not send its request in time."""

    code = "request_timeout"


class Unauthorized(DynamoError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class Forbidden(DynamoError):
    """The API key is known and may not do this."""

    code = "forbidden"


class RateLimited(DynamoError):
    """The rate limit of the API key is exhausted."""

    code = "rate_limit_exceeded"
    retryable = True


class ModelNotReady(DynamoError):
    """The model is still being prepared."""

    code = "model_not_ready"
    retryable = True


class NoWorkers(DynamoError):
    """No instance of the endpoint can take a request now."""

    code = "no_workers"
    retryable = True


class Overloaded(DynamoError):
    """Admission rejected the request before any work was done."""

    code = "overloaded"
    retryable = True


class WorkerFailed(DynamoError):
    """The instance died, lost its connection or failed during the request."""

    code = "worker_failed"
    retryable = True
    instance: str = ""
    """The instance id, empty where unknown."""


class InstanceGone(WorkerFailed):
    """The addressed instance no longer exists; its address belongs to another process."""

    code = "instance_gone"


class WorkerDraining(WorkerFailed):
    """The instance is draining. Another instance continues the request."""

    code = "worker_leaving"


class ServerStopped(DynamoError):
    """The server's drain time ended before the answer was complete."""

    code = "server_stopped"
    retryable = True


class PlaneUnavailable(DynamoError):
    """A server of a plane (etcd, NATS) cannot be reached now."""

    code = "plane_away"
    retryable = True


class PoisonedRequest(DynamoError):
    """The request made several workers fail."""

    code = "poisoned_request"


class DeadlineExceeded(DynamoError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class SlowReader(DynamoError):
    """The client read its stream too slowly and exceeded the backlog."""

    code = "slow_reader"


class Unsupported(InvalidRequest):
    """The feature is known and not supported (yet)."""

    code = "unsupported"


class ProtocolError(DynamoError):
    """A peer violated the protocol."""

    code = "protocol_error"


class ConfigError(DynamoError):
    """A setting, flag or file is wrong. The command line exits with 2."""

    code = "config_error"


class ModelUnavailable(DynamoError):
    """The model's files cannot be read or fetched."""

    code = "model_unavailable"


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wire form of an error."""

    code: str
    message: str
    hint: str = ""
    param: str | None = None
    retry_after_s: float | None = None


def describe_os_error(error: OSError) -> str:
    """Return "FILE: REASON", or the reason alone where no file is known."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


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
    return _encoder.encode(
        ErrorRecord(error.code, error.message, error.hint, error.param, error.retry_after_s)
    )


def decode_error(payload: bytes | memoryview) -> DynamoError:
    """Decode the result of `encode_error`. An unknown code becomes `InternalError`."""
    record = _decoder.decode(payload)
    cls = error_types().get(record.code, InternalError)
    return cls(
        record.message, hint=record.hint, param=record.param, retry_after_s=record.retry_after_s
    )
