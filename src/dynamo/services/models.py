"""The models that workers announce, each opened: tokenizer, template, processor, pipeline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from urllib.parse import unquote

from dynamo.application import Gateway, Served
from dynamo.core.errors import PlaneAway
from dynamo.models.card import ModelCard
from dynamo.models.template import ChatTemplate
from dynamo.models.tokenizer import load_tokenizer
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.health import PREPARATION
from dynamo.runtime.watch import Watch
from dynamo.scheduling.processor import Processor
from dynamo.services.catalogue import Catalogue, models_prefix
from dynamo.services.fetch import ensure_file
from dynamo.services.model_names import MODELS
from dynamo.services.routing import Routing
from dynamo.services.way import WORKER, Way

log = logging.getLogger(__name__)

LOOK_S = 0.02

WAITING = "no worker has announced a model yet"
NO_WORKERS = "this deployment starts no workers (engine.workers = 0) and waits for others"


class Models:
    """Follows what workers announce and gives it to a gateway; the runtime's health says what is
    still missing."""

    def __init__(self, runtime: DistributedRuntime, gateway: Gateway, routing: Routing) -> None:
        self._runtime = runtime
        self._gateway = gateway
        self._routing = routing
        self._ways: dict[str, Way] = {}
        self._watch = Watch(runtime.requests, runtime.clock, runtime.tasks, runtime.metrics)
        self._idle = WAITING if runtime.settings.engine.workers else NO_WORKERS
        if self._idle is NO_WORKERS:
            log.warning("no workers are started here", extra={"fields": {"engine.workers": 0}})
        self._catalogue = Catalogue(runtime, self._open, self._waiting)
        self._waiting("", self._idle)
        runtime.health.on_change(self._heard)

    def follow(self) -> None:
        """From now on until the runtime shuts down."""
        self._runtime.tasks.start(self._catalogue.follow(), MODELS)

    async def opened(self, within_s: float) -> None:
        """Return when the models that workers announce already are open, or after `within_s`."""
        runtime = self._runtime
        try:
            cards = await runtime.discovery.get(models_prefix(runtime.settings.runtime.namespace))
        except PlaneAway:  # nobody can say which
            return
        wanted = {unquote(key.rsplit("/", 2)[-2]) for key in cards}
        until = runtime.clock.now() + within_s
        while not wanted <= self._ways.keys() and runtime.clock.now() < until:
            await runtime.clock.sleep(LOOK_S)

    def workers(self) -> Mapping[str, int]:
        """How many instances serve each model."""
        return {name: len(way.client.instances) for name, way in self._ways.items()}

    def refused(self) -> Mapping[str, str]:
        """Workers that do not agree with their model's card, and in what."""
        return self._catalogue.refused()

    async def _open(self, card: ModelCard) -> None:
        """Everything that turns a model's requests into calls of its workers."""
        runtime, name = self._runtime, card.name
        component = runtime.namespace().component(WORKER)
        files = await component.endpoint("files").client()
        try:
            tokenizer_file = await ensure_file(runtime, files, card.tokenizer)
        finally:
            await files.close()
        tokenizer = await load_tokenizer(tokenizer_file, clock=runtime.clock, proven=True)
        template = await runtime.clock.offload(
            ChatTemplate, card.chat_template, bos_token=card.bos_token, eos_token=card.eos_token
        )

        way = await Way.open(runtime, self._watch, self._routing, card)
        processor = await runtime.clock.offload(
            Processor, card, tokenizer, template, way.send, runtime.settings.sampling, runtime.clock
        )
        self._gateway.add(Served(card.names, processor, card.created, card.context_tokens))
        before = self._ways.pop(name, None)
        self._ways[name] = way
        way.client.on_change(lambda: self._look(name, way))
        self._look(name, way)
        runtime.health.well_again(MODELS)
        if before is not None:
            await before.close()
        log.info("model ready", extra={"fields": {"model": name, "encoder": tokenizer.encoder}})

    def _heard(self) -> None:
        """Requests are told what health tells of the deployment."""
        self._gateway.waiting(self._runtime.health.reasons.get(PREPARATION, self._idle))

    def _waiting(self, name: str, reason: str) -> None:
        """No model is open yet, or `name` is not, and why."""
        if name:
            self._gateway.prepare(name, reason)
        else:
            self._gateway.waiting(reason)
        if not self._gateway.models:
            self._runtime.health.unwell(MODELS, f"{name}: {reason}" if name else reason)

    def _look(self, name: str, way: Way) -> None:
        if self._ways.get(name) is not way:
            return
        if way.client.instances:
            self._runtime.health.well_again(name)
        else:
            self._runtime.health.unwell(name, "no worker of this model can be reached now")
