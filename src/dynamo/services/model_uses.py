"""Keys in discovery by which a frontend tells supervisors that it has requests for models: for
those that are loaded when they are wanted, and for those that were removed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from math import inf
from urllib.parse import quote

from dynamo.application import Gateway
from dynamo.application.gateway import RETRY_AFTER_S
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers, Overloaded, PlaneUnavailable
from dynamo.core.reply import Reply, SendRequest
from dynamo.core.tasks import wait_at_most
from dynamo.core.values import GenerateRequest
from dynamo.models.tokenization.tokenizer import trim_heap
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.supervisors import IN_USE, WAITING, removals_prefix, uses_prefix
from dynamo.scheduling.admission.worker_starts import LoadPrediction
from dynamo.services.desired_models import DesiredModels

log = logging.getLogger(__name__)

POLL_S = 0.05
LINGER_S = 1.0
"""A model counts as in use for this time after its last request."""


class ModelUse:
    """The requests of one model in this process. `early` counts those that came while the model
    was not loaded, the first of them at `wanted_at`. Until `held_until`, supervisors are told
    `held_value` even without requests."""

    def __init__(self) -> None:
        self.requests = self.early = 0
        self.wanted_at = self.held_until = 0.0
        self.held_value = IN_USE
        self.published: bytes | None = None
        self.telling = self.has_timer = False

    def value(self, now: float) -> bytes | None:
        """Return the value of the key by which supervisors know of the requests; None: no key."""
        if self.requests:
            return WAITING if self.early else IN_USE
        return self.held_value if now < self.held_until else None


class ModelUses:
    """Tells supervisors which models that are on demand have requests here, by keys in discovery,
    and holds requests while such a model is loaded. Requests for other models pass none of this.
    """

    def __init__(
        self, runtime: DistributedRuntime, gateway: Gateway, desired: DesiredModels
    ) -> None:
        self._runtime = runtime
        self._gateway = gateway
        self._desired = desired
        self._uses: dict[str, ModelUse] = {}
        self._waiting = Counter[str]()
        self._changed = asyncio.Event()
        desired.on_change(self._on_change)
        gateway.on_change(self._on_change)

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def track(self, model: str, send: SendRequest) -> SendRequest:
        """Return a function that sends a model's requests and tells supervisors of them, which is
        `send` itself for a model that is not on demand."""
        if model not in self._desired.loads:
            return send

        async def send_tracked(request: GenerateRequest, context: Context, reply: Reply) -> None:
            async with self.hold(model, context.timeout_s, lambda: not self._is_leaving(model)):
                await send(request, context, reply)

        return send_tracked

    def load(self, model: str, timeout_s: float | None) -> AbstractAsyncContextManager[None]:
        """Have a model on demand open during the block, as `hold` does."""
        gateway = self._gateway
        return self.hold(
            model, timeout_s, lambda: model in gateway.models or model in gateway.embedding_models
        )

    @asynccontextmanager
    async def hold(
        self, model: str, timeout_s: float | None, is_ready: Callable[[], bool]
    ) -> AsyncIterator[None]:
        """Count the block as a request for a model on demand, and begin it when the model is ready.
        Raises `NoWorkers` if that takes too long, and `Overloaded`. A model that is no longer on
        demand is not waited for."""
        with self._use(model, early=not is_ready()):
            if not is_ready():
                await self._wait(model, timeout_s, is_ready)
            yield

    def predict(self, model: str) -> LoadPrediction | None:
        """Return when a model will be loaded for the requests that want it now; None for a model
        that is not on demand."""
        load = self._desired.loads.get(model)
        if load is None:
            return None
        use, now = self._uses.get(model), self._runtime.clock.now()
        waited_s = now - use.wanted_at if use is not None and use.early else 0.0
        return LoadPrediction(load.load_s, waited_s, load.backoff_s, load.reason)

    def _is_leaving(self, model: str) -> bool:
        load = self._desired.loads.get(model)
        return load is not None and load.state == "leaving"

    async def _wait(
        self, model: str, timeout_s: float | None, is_ready: Callable[[], bool]
    ) -> None:
        clock, settings = self._runtime.clock, self._runtime.settings.router
        limit_s = min(settings.ttft_slo or settings.max_queue_wait, timeout_s or inf)
        if self._waiting[model] >= settings.queue_bound:
            raise Overloaded(
                f"{self._waiting[model]} requests wait already until {model} is loaded",
                hint="the limit is router.queue_bound",
                retry_after_s=RETRY_AFTER_S,
            )
        prediction, deadline = self.predict(model), clock.now() + limit_s
        if prediction is not None:
            prediction.check(limit_s)
        self._waiting[model] += 1
        try:
            while not is_ready() and (prediction := self.predict(model)) is not None:
                if prediction.backoff_s or clock.now() >= deadline:
                    raise prediction.error(limit_s)
                await wait_at_most(self._changed.wait(), deadline - clock.now())
        finally:
            self._waiting[model] -= 1

    @contextmanager
    def _use(self, model: str, *, early: bool) -> Iterator[None]:
        """Count a request during the block. A request that is rejected while the model is loaded
        keeps it wanted until the client may come again."""
        clock, use = self._runtime.clock, self._uses.setdefault(model, ModelUse())
        load = self._desired.loads.get(model)
        early = early or (load is not None and load.state != "loaded")
        if early and not use.early:
            use.wanted_at = clock.now()
        use.requests += 1
        use.early += early
        self._tell(model, use)
        held_s, use.held_value = LINGER_S, IN_USE
        try:
            yield
        except NoWorkers as error:
            held_s, use.held_value = LINGER_S + (error.retry_after_s or 0.0), WAITING
            raise
        finally:
            use.requests -= 1
            use.early -= early
            use.held_until = max(use.held_until, clock.now() + held_s)
            self._tell(model, use)

    def _tell(self, model: str, use: ModelUse) -> None:
        """Put or delete the key of a model if its value has changed."""
        clock = self._runtime.clock
        value = use.value(clock.now())
        if value != use.published and not use.telling:
            use.telling = True
            self._runtime.tasks.start(self._put(model, use), f"use of {model}")
        if value is not None and not (use.requests or use.has_timer):
            use.has_timer = True
            clock.call_at(use.held_until, lambda: self._on_timer(model, use))

    def _on_timer(self, model: str, use: ModelUse) -> None:
        use.has_timer = False
        self._tell(model, use)

    async def _put(self, model: str, use: ModelUse) -> None:
        runtime = self._runtime
        prefix = uses_prefix(runtime.settings.runtime.namespace)
        key = f"{prefix}{quote(model, safe='')}/{runtime.instance_id}"
        try:
            while (value := use.value(runtime.clock.now())) != use.published:
                if value is None:
                    await runtime.discovery.delete(key)
                else:
                    await runtime.discovery.put(key, value)
                use.published = value
        except PlaneUnavailable as error:
            fields = {"model": model, "error": error.message}
            log.warning("supervisors do not learn of requests", extra={"fields": fields})
            runtime.clock.call_at(runtime.clock.now() + LINGER_S, lambda: self._tell(model, use))
        finally:
            use.telling = False


async def close_removed_model(
    runtime: DistributedRuntime,
    model: str,
    count_requests: Callable[[], int],
    close: Callable[[], Awaitable[None]],
) -> None:
    """Wait until a removed model has no requests at this frontend, and close it.

    A key in discovery holds its workers until then.
    """
    log.info("model removed", extra={"fields": {"model": model, "requests": count_requests()}})
    key = removals_prefix(runtime.settings.runtime.namespace, model) + runtime.instance_id
    busy = count_requests() > 0
    if busy:
        with suppress(PlaneUnavailable):
            await runtime.discovery.put(key, b"")
    while count_requests():
        await runtime.clock.sleep(POLL_S)
    if busy:
        with suppress(PlaneUnavailable):
            await runtime.discovery.delete(key)
    await close()
    del close
    # The pipeline has cycles, and a ready process freezes its objects and collects rarely.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()
