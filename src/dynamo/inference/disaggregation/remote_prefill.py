"""The interface of a worker to the prompts that workers compute for each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.core.tasks import BackgroundTasks
from dynamo.inference.disaggregation.messages import PREFILL_ENDPOINT
from dynamo.runtime.calls.failure_detector import FailureDetector

if TYPE_CHECKING:
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

    async def _follow(self, is_candidate: Callable[[Instance], bool]) -> Client:
        """Return a client of the other workers, in which failures are detected."""
        runtime = self._runtime
        client = await self._endpoint.client(is_candidate)
        detector = FailureDetector(runtime.requests, runtime.clock, self._tasks, runtime.metrics)
        detector.watch(client, spares_last=False)
        return client
