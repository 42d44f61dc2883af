"""The frontend's process: HTTP, processor and router, for every model that workers announce."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynamo.application import Application, Gateway, Served
from dynamo.communication.http import HttpLimits, HttpServer
from dynamo.models.card import ModelCard
from dynamo.models.template import ChatTemplate
from dynamo.models.tokenizer import load_tokenizer
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.instances import Instance
from dynamo.scheduling.assembly import standard_pipeline
from dynamo.scheduling.processor import Processor
from dynamo.services.catalogue import Catalogue
from dynamo.services.fetch import ensure_file
from dynamo.services.siblings import Siblings

log = logging.getLogger(__name__)

MODELS = "models"
WORKER = "worker"
WAITING = "no model is ready yet: no worker has announced one"


class Frontend:
    """Listens, follows the models, serves them until the runtime shuts down."""

    async def attach(self, runtime: DistributedRuntime) -> None:
        """Raises `PortInUse`, `ConfigError`."""
        self._runtime = runtime
        self._clients: dict[str, Client] = {}
        self._gateway = Gateway()
        self._waiting("", WAITING)
        server = runtime.settings.server
        application = Application(
            server,
            self._gateway,
            runtime.clock,
            runtime.metrics,
            reasons=lambda: runtime.health.reasons,
            facts=self._facts,
            metrics_text=Siblings(runtime).metrics,
        )
        http = HttpServer(
            application.handle,
            HttpLimits.of(server),
            runtime.clock,
            on_error=application.on_error,
        )
        host = server.http_host
        port = await http.start(host, server.http_port, reuse_port=runtime.supervised)
        runtime.at_shutdown(http.stop)
        runtime.public_address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        catalogue = Catalogue(runtime, self._open_model, self._waiting)
        runtime.tasks.start(catalogue.follow(), "models")
        runtime.metrics.gauge(
            "dynamo_frontend_workers",
            "Instances that serve a model",
            ("model",),
            callback=lambda: {(name,): count for name, count in self._workers().items()},
            merge="max",
        )
        log.info("frontend listens", extra={"fields": {"url": runtime.public_address}})

    async def _open_model(self, card: ModelCard) -> None:
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

        def serves(instance: Instance) -> bool:
            return bool(instance.capabilities.get("model") == name)

        client = await component.endpoint("generate").client(serves)
        send = standard_pipeline(client, runtime.settings.router.mode, runtime.metrics)
        processor = await runtime.clock.offload(
            Processor, card, tokenizer, template, send, runtime.settings.sampling, runtime.clock
        )
        self._gateway.add(Served(card.names, processor, card.created, card.context_tokens))
        before = self._clients.pop(name, None)
        self._clients[name] = client
        client.on_change(lambda: self._look(name, client))
        self._look(name, client)
        runtime.health.well_again(MODELS)
        if before is not None:
            await before.close()
        log.info("model ready", extra={"fields": {"model": name, "encoder": tokenizer.encoder}})

    def _waiting(self, name: str, reason: str) -> None:
        """No model is open yet, or `name` is not, and why."""
        if name:
            self._gateway.prepare(name, reason)
        else:
            self._gateway.waiting(reason)
        if not self._gateway.models:
            self._runtime.health.unwell(MODELS, f"{name}: {reason}" if name else reason)

    def _look(self, name: str, client: Client) -> None:
        if self._clients.get(name) is not client:
            return
        if client.instances:
            self._runtime.health.well_again(name)
        else:
            self._runtime.health.unwell(name, "no worker serves this model now")

    def _workers(self) -> Mapping[str, int]:
        return {name: len(client.instances) for name, client in self._clients.items()}

    def _facts(self) -> Mapping[str, Any]:
        """What only this process knows, for /health."""
        planes = self._runtime.settings.runtime
        return {
            "workers": self._workers(),
            "planes": {
                "discovery": planes.discovery or "file:",
                "requests": planes.requests,
                "events": planes.events,
            },
            "instance": self._runtime.instance_id,
        }
