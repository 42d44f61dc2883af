"""The interface of a worker to the prompts that workers compute for each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.core.errors import DECODE_ERRORS, ProtocolError
from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.disaggregation.messages import (
    PREFILL_ENDPOINT,
    PrefillRequest,
    decode_prefill_request,
)
from dynamo.runtime.calls.failure_detector import FailureDetector

if TYPE_CHECKING:
    from dynamo.communication.requests import ResponseWriter
    from dynamo.core.reply import SendRequest
    from dynamo.core.values import GenerateRequest
    from dynamo.runtime.calls.client import Client
    from dynamo.runtime.calls.instances import Instance
    from dynamo.runtime.component import Component, Endpoint, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime


class RemotePrefill(ABC):
    """Computes prompts for other workers of the component, and has prompts computed by them.

    `generate` answers requests as `Engine.generate` does.
    """

    generate: SendRequest

    def __init__(self, runtime: DistributedRuntime, component: Component) -> None:
        self._runtime = runtime
        self._tasks = BackgroundTasks()
        self._endpoint: Endpoint = component.endpoint(PREFILL_ENDPOINT)

    @property
    @abstractmethod
    def capabilities(self) -> Mapping[str, Any]:
        """The part of the instance record that other workers need."""

    @abstractmethod
    async def serve(
        self, capabilities: Mapping[str, Any], on_load_changed: Callable[[], None]
    ) -> Sequence[ServedEndpoint]:
        """Follow the other workers of the model, then serve the endpoint `prefill`."""

    def withdraw_after(self, generate_endpoint: ServedEndpoint) -> None:
        """Let a draining worker serve prompts and blocks until the requests of `generate_endpoint`
        have moved to other workers. Default: its engine keeps the KV of prompts by itself."""
        del generate_endpoint

    def on_request_cancelled(self, request: GenerateRequest) -> None:
        """Expect another worker to ask for the blocks of `request`, if this worker drains. Default:
        the KV of a request that moves is not handed over."""
        del request

    def set_roles(self, roles: Sequence[str]) -> None:
        """Take over changed roles of the worker. Default: they change nothing here."""
        del roles

    async def close(self) -> None:
        """Leave the other workers. A second call does nothing."""
        await self._tasks.close()

    @abstractmethod
    async def _compute(self, call: PrefillRequest, outgoing: ResponseWriter) -> None:
        """Compute a prompt for another worker, and tell it of the blocks or the KV."""

    async def _serve(
        self, capabilities: Mapping[str, Any], on_load_changed: Callable[[], None]
    ) -> ServedEndpoint:
        """Serve the endpoint. `on_load_changed` is called when a prompt arrives and when its call
        ends."""

        async def handle(payload: bytes, outgoing: ResponseWriter) -> None:
            try:
                call = decode_prefill_request(payload)
            except DECODE_ERRORS as error:
                raise ProtocolError(f"not a prefill request: {error}") from error
            on_load_changed()
            try:
                await self._compute(call, outgoing)
            finally:
                on_load_changed()

        return await self._endpoint.serve(handle, capabilities=capabilities)

    async def _follow(self, is_candidate: Callable[[Instance], bool]) -> Client:
        """Return a client of the other workers, in which failures are detected."""
        runtime = self._runtime
        client = await self._endpoint.client(is_candidate)
        detector = FailureDetector(runtime.requests, runtime.clock, self._tasks, runtime.metrics)
        detector.watch(client, spares_last=False)
        return client
