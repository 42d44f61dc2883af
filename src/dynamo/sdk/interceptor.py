"""The wrapper of every endpoint handler: current request, deadline and metrics."""

from __future__ import annotations

import asyncio

from dynamo.communication.requests import RequestHandler, ResponseWriter
from dynamo.core.clock import Clock
from dynamo.core.errors import DeadlineExceeded, DynamoError, InstanceGone, WorkerFailed
from dynamo.sdk.request_context import set_current_request
from dynamo.telemetry import Registry

DURATION_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 30, 60, 300),
)


class EndpointInterceptor:
    """Wraps the endpoint handlers of a service."""

    def __init__(self, service: str, clock: Clock, registry: Registry) -> None:
        self._service = service
        self._clock = clock
        self._requests = registry.counter(
            "dynamo_service_requests_total", "Calls answered", ("service", "endpoint", "code")
        )
        self._duration_seconds = registry.histogram(
            "dynamo_service_request_duration_seconds",
            "Time from a call to the end of its answer",
            DURATION_BUCKETS_S,
            ("service", "endpoint"),
        )
        self._inflight = registry.gauge(
            "dynamo_service_inflight_requests", "Calls being answered", ("service",)
        ).labels(service)

    def wrap(self, endpoint: str, handler: RequestHandler) -> RequestHandler:
        """Return `handler` with metrics and the deadline of each request."""
        now, inflight = self._clock.now, self._inflight
        seconds = self._duration_seconds.labels(self._service, endpoint)
        succeeded = self._requests.labels(self._service, endpoint, "ok")

        async def wrapped(payload: bytes, out: ResponseWriter) -> None:
            start = now()
            set_current_request(out.context, now)
            inflight.inc()
            try:
                await _with_deadline(out.context.timeout_s, handler, payload, out)
            except BaseException as error:
                self._requests.labels(self._service, endpoint, error_code(error)).inc()
                raise
            else:
                succeeded.inc()
            finally:
                inflight.dec()
                seconds.observe(now() - start)

        return wrapped


def error_code(error: BaseException) -> str:
    """Return the label value of an error in metrics."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return error.code if isinstance(error, DynamoError) else DynamoError.code


async def _with_deadline(
    limit_s: float | None, handler: RequestHandler, payload: bytes, out: ResponseWriter
) -> None:
    try:
        if limit_s is None:
            return await handler(payload, out)
        async with asyncio.timeout(limit_s) as limit:
            return await handler(payload, out)
    except InstanceGone as error:  # the callee is gone, not this instance
        raise WorkerFailed(error.message, hint=error.hint) from error
    except TimeoutError:
        if limit_s is None or not limit.expired():
            raise
        raise DeadlineExceeded(f"not answered within {limit_s:g} s") from None
