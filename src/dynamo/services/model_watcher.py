"""Opening of announced models: tokenizer, chat template, pipeline and processor of each."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from dynamo.application import Gateway, ServedModel
from dynamo.application.gateway import MODELS_HEALTH_KEY
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import wait_at_most
from dynamo.models.card import ModelCard
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.tokenization.tokenizer import Tokenizer, load_tokenizer
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.health import PREPARATION_REASON
from dynamo.scheduling.processor import ChatProcessor, TextProcessor
from dynamo.scheduling.router.features import only_decodes
from dynamo.services.adapters import served_adapters
from dynamo.services.catalogue import MODELS, Catalogue, incompatible_workers, models_prefix
from dynamo.services.desired_models import ModelState
from dynamo.services.model_pipeline import ModelPipeline, open_model_pipeline
from dynamo.services.model_store.store import ensure_file
from dynamo.services.model_uses import ModelUses, close_removed_model
from dynamo.services.routing import ProcessRouting

log = logging.getLogger(__name__)

TakeRequests = Callable[[str], Callable[[], int]]
POLL_INTERVAL_S = 0.02
SUPERVISORS_TIMEOUT_S = 5.0
"""A model is opened when the supervisors' records are read, at the latest after this time."""
NO_MODEL_ANNOUNCED = "no worker has announced a model yet"
NO_LOCAL_WORKERS = "this deployment starts no workers (engine.workers = 0) and waits for others"
SLEEPING_TEXT = "a request wakes one of its workers"
NO_PREFILL_WORKER = "no prefill worker: decode workers compute prompts"
NO_DISAGGREGATION = "router.disaggregation.mode is off: decode workers compute prompts"


def count_prefill_workers(count: int) -> str:
    """Return "2 prefill workers", or "" for none."""
    return f"{count} prefill worker{'s' * (count > 1)}" if count else ""


class ModelWatcher:
    """Opens the models that workers announce and adds them to a gateway, and forgets removed ones.

    The runtime's health reports that no model is open yet or has workers. `take_requests(model)`
    returns a function that counts the requests in flight of a model which gets no others, and
    `on_closed` is called when it has none. `other_states` are those of embedding models.
    """

    def __init__(
        self, runtime: DistributedRuntime, gateway: Gateway, routing: ProcessRouting
    ) -> None:
        self.take_requests: TakeRequests = lambda _: lambda: 0
        self.on_closed: Callable[[str], None] = lambda _: None
        self.other_states: Callable[[], Mapping[str, ModelState]] = dict
        self._runtime = runtime
        self._gateway = gateway
        self._routing = routing
        self._pipelines: dict[str, ModelPipeline] = {}
        self._failure_detector = FailureDetector(
            runtime.requests, runtime.clock, runtime.tasks, runtime.metrics
        )
        self._no_models_reason = (
            NO_MODEL_ANNOUNCED if runtime.settings.worker_count else NO_LOCAL_WORKERS
        )
        if self._no_models_reason is NO_LOCAL_WORKERS:
            log.warning(
                "this deployment starts no workers", extra={"fields": {"engine.workers": 0}}
            )
        self.desired = routing.desired_models()
        self.uses = ModelUses(runtime, gateway, self.desired)
        gateway.load = self.uses.load
        routing.predict_load = self.uses.predict
        self.desired.on_change(self._on_desired_change)
        self._catalogue = Catalogue(
            runtime, self.desired, MODELS, self._open_model, self._close_model, self._set_pending
        )
        self._set_pending("", self._no_models_reason)
        runtime.health.on_change(self._on_health_change)

    def start(self) -> None:
        """Follow the announced models until the runtime shuts down."""
        self._runtime.tasks.start(self._catalogue.run(), MODELS_HEALTH_KEY)

    async def wait_until_opened(self, timeout_s: float) -> None:
        """Wait until all models that are announced now are open and their workers were tried, at
        most `timeout_s`."""
        runtime = self._runtime
        try:
            cards = await runtime.discovery.get(models_prefix(runtime.settings.runtime.namespace))
        except PlaneUnavailable:
            return
        announced = {unquote(key.rsplit("/", 2)[-2]) for key in cards}
        deadline = runtime.clock.now() + timeout_s
        while not all(map(self._is_settled, announced)) and runtime.clock.now() < deadline:
            await runtime.clock.sleep(POLL_INTERVAL_S)

    def _is_settled(self, name: str) -> bool:
        pipeline = self._pipelines.get(name)
        return pipeline is not None and not pipeline.client.view.verifying

    def count_workers(self) -> Mapping[str, int]:
        """Return the number of instances by model."""
        return {name: len(pipeline.client.instances) for name, pipeline in self._pipelines.items()}

    def prefill_workers(self) -> Mapping[str, str]:
        """Return by model who computes prompts, for models with decode workers."""
        off = self._runtime.settings.router.disaggregation.mode == "off"
        return {
            name: NO_DISAGGREGATION if off else count_prefill_workers(count) or NO_PREFILL_WORKER
            for name, pipeline in self._pipelines.items()
            for count in [len(pipeline.prefill_client.instances)]
            if count or any(map(only_decodes, pipeline.client.instances.values()))
        }

    def incompatible_workers(self) -> Mapping[str, str]:
        """Return by instance how a worker's card differs from its model's card."""
        return incompatible_workers(self._catalogue)

    def unreachable_workers(self) -> Mapping[str, str]:
        """Return by instance why an announced worker gets no requests."""
        views = [pipeline.client.view for pipeline in self._pipelines.values()]
        return dict(ChainMap(*(dict(view.unreachable_reasons()) for view in views)))

    def count_unusable(self) -> Mapping[str, int]:
        """Return the number of announced workers that get no requests, by reason."""
        views = [pipeline.client.view for pipeline in self._pipelines.values()]
        return {
            "refused": len(self.incompatible_workers()),
            "unreachable": len(self.unreachable_workers()),
            "ejected": sum(len(view.ejected) for view in views),
        }

    async def _open_model(self, card: ModelCard) -> None:
        """Build the pipeline and processor of a card's model and serve it."""
        runtime, name = self._runtime, card.name
        await wait_at_most(self._routing.follow_supervisors().is_read.wait(), SUPERVISORS_TIMEOUT_S)
        text_parts = None if card.tokenizer is None else await self._load_text_parts(card)
        pipeline = await open_model_pipeline(runtime, self._failure_detector, self._routing, card)
        send = self.uses.track(name, pipeline.send)
        processor: ChatProcessor | TextProcessor
        if text_parts is None:
            processor = TextProcessor(card, send, runtime.settings.sampling)
        else:
            processor = await runtime.clock.offload(
                ChatProcessor,
                card,
                *text_parts,
                send,
                runtime.settings.sampling,
                runtime.clock,
            )
        served = ServedModel(
            card.names,
            processor,
            card.created,
            card.context_tokens,
            tool_format=processor.tool_format,
            sampling=processor.default_sampling,
            bos_token=card.bos_token,
            eos_token=card.eos_token,
        )
        previous = self._pipelines.get(name)
        self._pipelines[name] = pipeline
        encoder = text_parts[0].encoder_name if text_parts else "none: the server has the tokenizer"
        if previous is not None:  # requests continue with the new pipeline's queue
            self._add(served, encoder)
        update = partial(self._on_workers_changed, pipeline, served, encoder)
        pipeline.client.on_change(update)
        pipeline.client.view.on_reason_change(update)
        pipeline.sleeping.on_change(update)
        runtime.health.add_check(name, partial(self._check_health, name))
        update()
        runtime.health.set_healthy(MODELS_HEALTH_KEY)  # from now on under the model's name
        if previous is not None:
            await previous.close()

    async def _load_text_parts(self, card: ModelCard) -> tuple[Tokenizer, ChatTemplate]:
        """Return tokenizer and template of a card that has them. Raises `ModelUnavailable`."""
        runtime = self._runtime
        tokenizer_file = await ensure_file(runtime, card.tokenizer_file)
        offload = runtime.clock.offload
        tokenizer = await offload(load_tokenizer, tokenizer_file, ensure_verified=True)
        return tokenizer, await offload(ChatTemplate.of, card)

    def _add(self, served: ServedModel, encoder: str) -> None:
        self._gateway.add(served)
        fields = {"model": served.names[0], "encoder": encoder}
        log.info("model ready", extra={"fields": fields})

    def _on_workers_changed(
        self, pipeline: ModelPipeline, served: ServedModel, encoder: str
    ) -> None:
        """Serve a model from its first worker on, which is reachable or sleeps, and report the lack
        of workers."""
        name = served.names[0]
        if self._pipelines.get(name) is not pipeline:
            return
        instances = pipeline.client.instances
        if (instances or pipeline.sleeping) and name not in self._gateway.models:
            self._add(served, encoder)
        if instances:
            adapters = served_adapters(served, instances.values())
            self._gateway.set_adapters(name, adapters)
        elif name not in self._gateway.models:
            self._gateway.set_pending(name, self._unreachable_reason(name))
        self._update_health()

    def _unreachable_reason(self, name: str) -> str:
        """Return why a model has no worker at present, or "" if it has one, which may sleep."""
        pipeline = self._pipelines[name]
        if pipeline.client.instances or pipeline.sleeping:
            return ""
        prefill = count_prefill_workers(len(pipeline.prefill_client.instances))
        causes = (
            pipeline.starts.describe(),
            pipeline.client.view.describe_unavailable(),
            f"{prefill} and no worker that computes answers" if prefill else "",
        )
        text = "; ".join(filter(None, causes))
        return "no worker of this model is reachable" + (f": {text}" if text else "")

    def model_states(self) -> Mapping[str, ModelState]:
        """Return the state of every model that is served, was announced or is to be served."""
        states = {name: self.desired.state(name) for name in self.desired.aliases}
        for name, pipeline in self._pipelines.items():
            if reason := self._unreachable_reason(name):
                state = self.desired.state(name)
                states[name] = (
                    state if name in self.desired.loads else state._replace(reason=reason)
                )
            elif pipeline.client.instances:
                states[name] = ModelState("loaded")
            else:
                states[name] = ModelState("sleeping", SLEEPING_TEXT)
        return {**states, **self.other_states()}

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the fields of `/v1/models` on each model's state, in llama.cpp's form."""
        described: dict[str, dict[str, Any]] = {}
        for name, state in self.model_states().items():
            reason = {"reason": state.reason} if state.reason else {}
            described[name] = {"status": {"value": state.state, **reason}}
        for name, workers in self.count_workers().items():
            described[name]["workers"] = workers
        return described

    def _serves_any(self) -> bool:
        """Whether a model has a worker, which may sleep, or can be loaded."""
        if any(not load.backoff_s for load in self.desired.loads.values()):
            return True
        if any(each.client.instances or each.sleeping for each in self._pipelines.values()):
            return True
        return any(state.state == "loaded" for state in self.other_states().values())

    def unroutable_reason(self) -> str:
        """Return why no model has had an answer from a worker of each role that it needs, or ""."""
        reasons = [self._no_models_reason] if not self._pipelines else []
        off = self._runtime.settings.router.disaggregation.mode == "off"
        for name, pipeline in self._pipelines.items():
            workers = pipeline.client.instances.values()
            if reason := self._unreachable_reason(name):
                reasons.append(reason)
            elif not workers or off or pipeline.prefill_client.instances:
                return ""  # without workers, it sleeps
            elif all(map(only_decodes, workers)):
                reasons.append(f"{name}: {NO_PREFILL_WORKER}")
            else:
                return ""
        can_load = any(not load.backoff_s for load in self.desired.loads.values())
        opened = any(state.state == "loaded" for state in self.other_states().values())
        return "" if can_load or opened else "; ".join(reasons)

    def _check_health(self, name: str) -> str:
        """Return why a model has no worker, or "" if it or another one has."""
        return "" if self._serves_any() else self._unreachable_reason(name)

    def _update_health(self) -> None:
        health = self._runtime.health
        for name in self._pipelines:
            if reason := self._check_health(name):
                health.set_unhealthy(name, reason)
            else:
                health.set_healthy(name)

    def _on_desired_change(self) -> None:
        """Name the models as their supervisors do, and remove those that they dropped."""
        gateway, desired = self._gateway, self.desired
        for model in desired.removed:
            gateway.remove(model)
        gateway.set_desired(desired.aliases, desired.adapters)
        self._explain_pending()

    def _explain_pending(self) -> None:
        """Tell the gateway why each desired model is not open: it is fetched, or what is known."""
        gateway, desired = self._gateway, self.desired
        preparation = self._runtime.health.reasons.get(PREPARATION_REASON)
        served = gateway.models.keys() | gateway.embedding_models.keys()
        for model in desired.aliases.keys() - served - self._pipelines.keys():
            gateway.set_pending(model, preparation or desired.state(model).reason)
        gateway.set_unloaded(
            {name: load.embeds for name, load in desired.loads.items() if name not in served}
        )
        if desired.loads and self._serves_any():
            self._runtime.health.set_healthy(MODELS_HEALTH_KEY)

    def _close_model(self, name: str) -> None:
        """Close the pipeline of a removed model when its requests have ended."""
        runtime, pipeline = self._runtime, self._pipelines.pop(name)
        self._gateway.remove(name)
        runtime.health.remove(name)
        self._update_health()

        async def close() -> None:
            await pipeline.close()
            if name not in self._pipelines:
                self._routing.remove_model(name)
                self.on_closed(name)

        removal = close_removed_model(runtime, name, self.take_requests(name), close)
        runtime.tasks.start(removal, f"remove {name}")

    def _on_health_change(self) -> None:
        """Answer requests with the deployment's health reason while no model is open."""
        self._gateway.set_no_models_reason(
            self._runtime.health.reasons.get(PREPARATION_REASON, self._no_models_reason)
        )
        self._explain_pending()

    def _set_pending(self, name: str, reason: str) -> None:
        """Report why a model is not open yet; "" for `name` means all models."""
        if name:
            self._gateway.set_pending(name, reason)
        else:
            self._gateway.set_no_models_reason(reason)
        if not (self._gateway.models or self._serves_any()):
            self._runtime.health.set_unhealthy(
                MODELS_HEALTH_KEY, f"{name}: {reason}" if name else reason
            )
