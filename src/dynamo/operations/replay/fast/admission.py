"""Admission in a fast replay: the decisions of the real one, without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.operations.replay.fast.events import EventHeap
from dynamo.operations.replay.fast.request import FastRequest
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance, InstanceFilter
from dynamo.scheduling.admission.admission import Admission
from dynamo.scheduling.admission.label_queues import QueuedRequest
from dynamo.scheduling.router.features import decodes, only_prefills
from dynamo.scheduling.router.policy import Policy
from dynamo.scheduling.workers.ledger import Ledger

SAMPLING, STOPS = SamplingParams(), StopConditions()


class FastAdmission(Admission):
    """Admit the requests of a fast replay. `queued` are those that wait. `forward` chooses a worker
    for a request that is admitted; `reject` ends one that is not."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        heap: EventHeap,
        settings: RouterSettings,
        forward: Callable[[FastRequest], None],
        reject: Callable[[FastRequest, DynamoError], None],
    ) -> None:
        self.queued: dict[str, FastRequest] = {}
        self._views = InstanceSet(decodes), InstanceSet(only_prefills)
        clients = [cast("Client", view) for view in self._views]
        super().__init__(clients[0], ledger, policy, heap, settings, prefill_client=clients[1])
        self._heap, self._forward, self._reject = heap, forward, reject

    def admit(self, request: FastRequest) -> None:
        """Forward, queue or reject a request."""
        name, tokens = str(request.row), bytes(request.prompt_tokens * TOKEN_BYTES)
        generate, context = GenerateRequest(name, "", tokens, SAMPLING, STOPS), Context(name)
        try:
            skips = self._can_skip_queue(context)
            queued = None if skips else self._admit_or_enqueue(generate, context)
        except DynamoError as error:
            self._reject(request, error)
            return
        if queued is None or queued.slot_ready is None:
            self._dispatching[f"{name}/0"] = queued
            self._dispatch(request)
        else:
            self.queued[name] = request
            cast("_Slot", queued.slot_ready).on_ready = partial(self._on_slot_ready, request)

    def update_instances(self, instances: Mapping[str, Instance]) -> None:
        """Follow the workers."""
        for view in self._views:
            view.update(instances)

    def on_not_placed(self, request: FastRequest) -> None:
        """Let the next request have the place of one that the router has not sent."""
        self._dispatching.pop(f"{request.row}/0", None)
        self._dequeue_ready()

    def _dispatch(self, request: FastRequest) -> None:
        if self.capacity.free_slots:
            request.excluded = self.capacity.full_workers
        self._forward(request)

    def _on_slot_ready(self, request: FastRequest, error: DynamoError | None) -> None:
        del self.queued[str(request.row)]
        act = partial(self._dispatch, request)
        if error is not None:
            act = partial(self._reject, request, error)
        self._heap.soon.append(act)

    def _push(self, queued: QueuedRequest, shed_at_s: float) -> None:
        self._queue.push(queued)
        queued.slot_ready = cast("asyncio.Future[None]", _Slot())
        self._clock.call_at(shed_at_s, partial(self._shed_overdue, queued))
        self._schedule_recheck()


class _Slot:
    """The part of a future that admission uses, with a callback for its result."""

    def __init__(self) -> None:
        self.on_ready: Callable[[DynamoError | None], None] = lambda _: None
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, _: None) -> None:
        self._done = True
        self.on_ready(None)

    def set_exception(self, error: DynamoError) -> None:
        self._done = True
        self.on_ready(error)


class InstanceSet:
    """The part of a client that admission uses: the instances that it `accepts`."""

    def __init__(self, accepts: InstanceFilter) -> None:
        self.instances: Mapping[str, Instance] = {}
        self._accepts = accepts
        self._listeners: list[Callable[[], None]] = []

    def update(self, instances: Mapping[str, Instance]) -> None:
        """Follow the workers."""
        accepts = self._accepts
        self.instances = {name: each for name, each in instances.items() if accepts(each)}
        for listener in self._listeners:
            listener()

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each change. The returned canceller does nothing."""
        self._listeners.append(callback)
        return callback
