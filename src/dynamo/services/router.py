"""The router process: chooses workers for the requests of frontends, and tells its choices.

Tokens never pass through this process. The frontends publish which requests they send and how those
end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from dynamo.application.console.handler import CONSOLE_PATH
from dynamo.application.gateway import MODELS_HEALTH_KEY
from dynamo.application.observer import ObserverRedirect
from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import DECODE_ERRORS, ModelNotReady, ProtocolError
from dynamo.models.card import ModelCard
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.factory import KV
from dynamo.scheduling.router.policies.remote_messages import (
    CHOOSE_ENDPOINT,
    QUERY_ACCEPTED,
    decode_query,
    encode_reply,
    request_from_query,
)
from dynamo.sdk.decorators import spec_of
from dynamo.services import components
from dynamo.services.catalogue import MODELS, Catalogue, incompatible_workers
from dynamo.services.model_pipeline import ModelPipeline, open_router_process_pipeline
from dynamo.services.model_uses import close_removed_model
from dynamo.services.observing.pages import find_observer_url, serve_pages
from dynamo.services.observing.publisher import StoryPublisher
from dynamo.services.routing import ProcessRouting
from dynamo.telemetry.metrics import Counter

log = logging.getLogger(__name__)

RESERVATION_TIMEOUT_S = 5.0
"""A choice that no frontend has used after this time is released: the frontend has died."""
RETRY_AFTER_S = 1.0
_REPLICA_SUFFIX = re.compile(r"-([1-9]\d?)\Z")


class RouterService:
    """Chooses workers for all announced models until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Start serving. Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        self._routing = ProcessRouting(runtime)
        if (mode := runtime.settings.router.mode) != KV:
            log.warning(
                "frontends use router processes in mode kv only", extra={"fields": {"mode": mode}}
            )
        self._models: dict[str, ModelPipeline] = {}
        self._decisions: dict[str, Counter] = {}
        runtime.health.set_unhealthy(MODELS_HEALTH_KEY, "no worker has announced a model yet")
        self._publisher: StoryPublisher | None = None
        if runtime.settings.observer.enabled:
            self._publisher = StoryPublisher(runtime, self._routing.sample)
            await self._publisher.start()
            runtime.add_shutdown_hook(lambda _: self._close_publisher())
        host, port = runtime.settings.router.host, runtime.settings.router.port
        port = port and port + replica_index(runtime.name)
        redirect = ObserverRedirect(lambda: find_observer_url(runtime))
        await serve_pages(
            runtime,
            host,
            port,
            redirect.routes(),
            self._health_facts,
            page_path=CONSOLE_PATH,
            open_pages={CONSOLE_PATH: {"GET": redirect.redirect}},
        )
        log.info("router listens", extra={"fields": {"url": runtime.public_address}})
        component = runtime.namespace().component(spec_of(components.Router).name)
        await component.endpoint(CHOOSE_ENDPOINT).serve(self._handle_choose)
        desired = self._routing.desired_models()
        self._catalogue = Catalogue(
            runtime, desired, MODELS, self._open_model, self._close_model, self._set_pending
        )
        runtime.tasks.start(self._catalogue.run(), MODELS_HEALTH_KEY)
        runtime.tasks.start(self._release_expired(), "unused choices")

    async def _close_publisher(self) -> None:
        if self._publisher is not None:
            await self._publisher.close()

    async def _handle_choose(self, payload: bytes, out: ResponseWriter) -> None:
        """Answer QUERY_ACCEPTED at once and the decision later."""
        out.send(QUERY_ACCEPTED)
        try:
            query = decode_query(payload)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"the payload is not a routing query: {error}") from error
        model = self._models.get(query.model)
        if model is None:
            raise ModelNotReady(
                f"no worker has announced {query.model!r} to this router",
                retry_after_s=RETRY_AFTER_S,
            )
        request = request_from_query(query, out.context.request_id)
        decision = await model.policy.choose(request, out.context, frozenset(query.excluded))
        if self._publisher is not None:
            self._publisher.add_choice(request, decision)
        self._decisions[query.model].inc()
        out.send(encode_reply(decision))

    async def _open_model(self, card: ModelCard) -> None:
        model = await open_router_process_pipeline(self._runtime, self._routing, card)
        previous = self._models.get(card.name)
        self._models[card.name] = model
        self._decisions[card.name] = model.metrics.counter(
            "dynamo_router_decisions_total",
            "Choices of workers that this router made for frontends",
        )
        self._runtime.health.set_healthy(MODELS_HEALTH_KEY)
        if previous is not None:
            await previous.close()
        log.info("routes a model", extra={"fields": {"model": card.name}})

    def _close_model(self, name: str) -> None:
        """Close a removed model when it holds no request for a better moment."""
        runtime, model = self._runtime, self._models[name]

        async def close() -> None:
            if self._models.get(name) is model:
                del self._models[name], self._decisions[name]
                self._routing.remove_model(name)
            await model.close()

        removal = close_removed_model(runtime, name, lambda: model.policy.waiting, close)
        runtime.tasks.start(removal, f"remove {name}")

    async def _release_expired(self) -> None:
        clock = self._runtime.clock
        while True:
            await clock.sleep(RESERVATION_TIMEOUT_S / 2)
            for model in self._models.values():
                model.ledger.expire(clock.now() - RESERVATION_TIMEOUT_S)

    def _set_pending(self, name: str, reason: str) -> None:
        if not self._models:
            self._runtime.health.set_unhealthy(
                MODELS_HEALTH_KEY, f"{name}: {reason}" if name else reason
            )

    def _health_facts(self) -> Mapping[str, Any]:
        return {
            "models": list(self._models),
            "workers": {name: len(model.client.instances) for name, model in self._models.items()},
            "refused_workers": incompatible_workers(self._catalogue),
            "routing": self._routing.view_modes(),
            "waiting": self._routing.count_waiting(),
            "instance": self._runtime.instance_id,
        }


def replica_index(name: str) -> int:
    """Return the index of a replica by its process name: 1 for "router-2"."""
    number = _REPLICA_SUFFIX.search(name)
    return int(number[1]) - 1 if number else 0
