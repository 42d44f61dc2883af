"""Typed errors. Raised where known, carried over the wire by `code`, translated to HTTP once.

`code` is what a program tests, the message says what happened and why, `hint` what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class DynamoError(Exception):
    """Base of every error that a user may see."""

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
    """A bug of ours."""


class InvalidRequest(DynamoError):
    """The request itself is wrong; the same request will fail again."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(DynamoError):
    """No model of that name is served."""

    code = "model_not_found"


class NotFound(DynamoError):
    """No such route, endpoint or file."""

    code = "not_found"


class MethodNotAllowed(DynamoError):
    """The route exists, the method does not."""

    code = "method_not_allowed"


class TooLarge(DynamoError):
    """A body, a header or a frame is over its limit."""

    code = "request_too_large"


class RequestTooSlow(DynamoError):
    """The client did not send its request in time."""

    code = "request_timeout"


class Unauthorized(DynamoError):
    """No key, or a wrong one."""

    code = "invalid_api_key"


class Forbidden(DynamoError):
    """The key is known and may not do this."""

    code = "forbidden"


class RateLimited(DynamoError):
    """A key's limit is used up."""

    code = "rate_limit_exceeded"
    retryable = True


class ModelNotReady(DynamoError):
    """The model is still getting ready."""

    code = "model_not_ready"
    retryable = True


class NoWorkers(DynamoError):
    """No instance of this endpoint can be asked now."""

    code = "no_workers"
    retryable = True


class Overloaded(DynamoError):
    """Admission rejected the request before any work was done."""

    code = "overloaded"
    retryable = True


class WorkerFailed(DynamoError):
    """The instance died, broke its connection, or failed while it worked."""

    code = "worker_failed"
    retryable = True
    instance: str = ""
    """Its id, where that is known."""


class InstanceGone(WorkerFailed):
    """The instance that was addressed is not there any more (another incarnation answers)."""

    code = "instance_gone"


class WorkerDraining(WorkerFailed):
    """The instance was taken out of service while it worked; another one goes on."""

    code = "worker_leaving"


class ServerStopped(DynamoError):
    """The server's drain time ended before the answer was whole."""

    code = "server_stopped"
    retryable = True


class PlaneUnavailable(DynamoError):
    """A server that a plane needs (etcd, NATS) cannot be reached now."""

    code = "plane_away"
    retryable = True


class PoisonedRequest(DynamoError):
    """A request that killed several workers."""

    code = "poisoned_request"


class DeadlineExceeded(DynamoError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class SlowReader(DynamoError):
    """The client read its stream too slowly and its backlog ran over."""

    code = "slow_reader"


class Unsupported(InvalidRequest):
    """Known, and not supported (yet)."""

    code = "unsupported"


class ProtocolError(DynamoError):
    """A peer broke the protocol."""

    code = "protocol_error"


class ConfigError(DynamoError):
    """A setting, flag or file is wrong. The command line exits with 2."""

    code = "config_error"


class ModelUnavailable(DynamoError):
    """A model's files cannot be read or fetched."""

    code = "model_unavailable"


class ErrorRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it crosses the wire."""

    code: str
    message: str
    hint: str = ""
    param: str | None = None
    retry_after_s: float | None = None


def _classes_by_code(base: type[DynamoError]) -> dict[str, type[DynamoError]]:
    found = {base.code: base}
    for sub in base.__subclasses__():
        found.update(
            {code: cls for code, cls in _classes_by_code(sub).items() if code not in found}
        )
    return found


def describe_os_error(error: OSError) -> str:
    """What the system said, and of which file."""
    said = error.strerror or str(error)
    return f"{error.filename}: {said}" if error.filename else said


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ErrorRecord)


def error_types() -> dict[str, type[DynamoError]]:
    """Every error class by its code."""
    return _classes_by_code(DynamoError) | {InternalError.code: InternalError}


def encode_error(error: DynamoError) -> bytes:
    """One error as msgpack bytes."""
    return _encoder.encode(
        ErrorRecord(error.code, error.message, error.hint, error.param, error.retry_after_s)
    )


def decode_error(payload: bytes | memoryview) -> DynamoError:
    """The error that `encode_error` wrote; an unknown code becomes `InternalError`."""
    record = _decoder.decode(payload)
    cls = error_types().get(record.code, InternalError)
    return cls(
        record.message, hint=record.hint, param=record.param, retry_after_s=record.retry_after_s
    )
