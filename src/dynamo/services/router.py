"""The router's own process: answers which instance a request should go to, and why. Tokens never
pass through it; what becomes of a request it hears from the frontends."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.application.routing_app import RoutingApplication
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.communication.requests import Outgoing
from dynamo.core.errors import NotReady, ProtocolError
from dynamo.models.card import ModelCard
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.router.opening import KV
from dynamo.scheduling.router.placing.fleet import Active
from dynamo.scheduling.router.remote.messages import (
    CHOOSE,
    TAKEN,
    decode_ask,
    encode_answer,
    request_of,
)
from dynamo.sdk.declare import spec_of
from dynamo.services import components
from dynamo.services.agreement import Agreement
from dynamo.services.catalogue import Catalogue
from dynamo.services.model_names import MODELS
from dynamo.services.routing import ModelRouting, Routing
from dynamo.services.routing_answers import RoutingAnswers
from dynamo.services.way import WORKER

log = logging.getLogger(__name__)

PROMISED_S = 5.0
"""A place that nobody has taken by then is given back: its frontend died on the way."""
RETRY_S = 1.0
_REPLICA = re.compile(r"-([1-9]\d?)\Z")


class Router:
    """Follows the models and their workers; answers until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        self._routing = Routing(runtime)
        if (mode := runtime.settings.router.mode) != KV:
            log.warning("frontends ask a router in mode kv alone", extra={"fields": {"mode": mode}})
        self._models: dict[str, ModelRouting] = {}
        self._chosen = runtime.metrics.counter(
            "dynamo_router_decisions_total", "Questions of frontends that this router answered"
        )
        runtime.health.unwell(MODELS, "no worker has announced a model yet")
        answers = RoutingAnswers(runtime, self._routing)
        await answers.start()
        await self._listen(answers)
        component = runtime.namespace().component(spec_of(components.Router).name)
        await component.endpoint(CHOOSE).serve(self._choose)
        catalogue = Catalogue(runtime, self._open, self._waiting)
        self._refused = catalogue.refused
        runtime.tasks.start(catalogue.follow(), MODELS)
        runtime.tasks.start(self._give_back(), "places not taken")

    async def _listen(self, answers: RoutingAnswers) -> None:
        runtime, settings = self._runtime, self._runtime.settings
        application = RoutingApplication(
            settings.server,
            answers,
            runtime.clock,
            runtime.metrics,
            reasons=lambda: runtime.health.reasons,
            facts=self._facts,
        )
        http = HttpServer(
            application.handle,
            HttpLimits.of(settings.server),
            runtime.clock,
            on_error=application.on_error,
        )
        host, port = settings.router.host, settings.router.port
        port = await http.start(host, port and port + replica(runtime.name))
        runtime.at_shutdown(http.stop)
        runtime.public_address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("router listens", extra={"fields": {"url": runtime.public_address}})

    async def _choose(self, payload: bytes, out: Outgoing) -> None:
        """One question; `TAKEN` at once, the answer when it has fallen."""
        out.send(TAKEN)
        try:
            ask = decode_ask(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a question for a router: {error}") from error
        model = self._models.get(ask.model)
        if model is None:
            raise NotReady(f"no worker has announced {ask.model!r} here", retry_after_s=RETRY_S)
        request = request_of(ask, out.context.request_id)
        made = await model.policy.choose(request, out.context, frozenset(ask.tried))
        if model.follower is not None and isinstance(made.ticket, Active):
            model.follower.promise(made.ticket)
        self._routing.watch.explained.keep(request, replace(made, ticket=None))
        self._chosen.inc()
        out.send(encode_answer(made))

    async def _open(self, card: ModelCard) -> None:
        name = card.name
        endpoint = self._runtime.namespace().component(WORKER).endpoint("generate")
        client = await endpoint.client(Agreement(card).serves)
        model = await self._routing.own(card, client, asked=True)
        before = self._models.get(name)
        self._models[name] = model
        self._routing.add(name, model)
        self._runtime.health.well_again(MODELS)
        if before is not None:
            await before.close()
            await before.client.close()
        log.info("routes a model", extra={"fields": {"model": name}})

    async def _give_back(self) -> None:
        clock = self._runtime.clock
        while True:
            await clock.sleep(PROMISED_S / 2)
            for model in self._models.values():
                if model.follower is not None:
                    model.follower.give_back(clock.now() - PROMISED_S)

    def _waiting(self, name: str, reason: str) -> None:
        if not self._models:
            self._runtime.health.unwell(MODELS, f"{name}: {reason}" if name else reason)

    def _facts(self) -> Mapping[str, Any]:
        return {
            "models": list(self._models),
            "workers": {name: len(one.workers) for name, one in self._models.items()},
            "refused_workers": self._refused(),
            "routing": self._routing.views(),
            "waiting": sum(one.waiting for one in self._models.values()),
            "instance": self._runtime.instance_id,
        }


def replica(name: str) -> int:
    """How many replicas of a process called `name` come before it: 1 of "router-2"."""
    number = _REPLICA.search(name)
    return int(number[1]) - 1 if number else 0
