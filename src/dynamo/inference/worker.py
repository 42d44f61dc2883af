"""A worker: an engine that serves requests and publishes its model card, load and KV events."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from dynamo.communication.events import EventSource
from dynamo.communication.requests import RequestHandler, ResponseWriter
from dynamo.core.adapters import ADAPTERS_ENDPOINT, adapter_name
from dynamo.core.clock import SystemClock
from dynamo.core.codec import decode_request, decode_shared_request
from dynamo.core.errors import DECODE_ERRORS, InvalidRequest, ProtocolError, Unsupported
from dynamo.core.features import required_features
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.kv_events import LOAD_METRICS_SUBJECT, encode_kv_event_payloads, model_subject
from dynamo.core.labels import LABELS_KEY, parse_labels
from dynamo.core.reply import Engine, EngineRank, LoraAdapters
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import ROLES_BY_NAME, BlocksCleared, EngineInfo, KvEvent, worker_role
from dynamo.inference.data_parallel import batched_engines
from dynamo.inference.disaggregation.connector_prefill import ConnectorPrefill
from dynamo.inference.disaggregation.remote_prefill import RemotePrefill
from dynamo.inference.disaggregation.worker_prefill import WorkerPrefill
from dynamo.inference.engines.adapter_endpoint import AdapterEndpoint, load_model_adapters
from dynamo.inference.engines.arguments import ENGINES_WITH_CONNECTORS, check_role
from dynamo.inference.kv_publisher import KVPublisher, declare_kv_publisher_metrics
from dynamo.inference.load_publisher import CoreWait, LoadPublisher
from dynamo.inference.memory.tier_control import KV_ENDPOINT, KvControl, declare_tier_metrics
from dynamo.inference.probe import answer_probe, encode_probe_result
from dynamo.inference.sleep.sleep_endpoint import SleepEndpoint
from dynamo.inference.vllm_names import CountedReply, VllmNames
from dynamo.inference.worker_metrics import declare_worker_metrics
from dynamo.models.card import block_identity
from dynamo.runtime.supervisors import SUPERVISOR_KEY

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard
    from dynamo.runtime.component import Component, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)


def model_card_key(namespace: str, model: str, instance: str) -> str:
    """Return the discovery key of a worker's card. A slash in the model's name becomes %2F."""
    return f"/{namespace}/models/{quote(model, safe='')}/{instance}"


class EngineWorker:
    """Serves one engine. Call `attach` once, then `close` or end the process."""

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        *,
        component: str = "worker",
        fetch_adapter: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        self._engine = engine
        self._fetch_adapter = fetch_adapter
        self._card = card
        self._component = component
        self._tasks = BackgroundTasks()
        self._prefill: RemotePrefill
        self._endpoints: list[ServedEndpoint] = []
        self._event_sources: list[EventSource | KVPublisher] = []
        self._is_announced = False

    async def attach(self, runtime: DistributedRuntime) -> ModelCard:
        """Start the engine, serve its endpoints and announce the card, which is returned. Raises
        `ModelUnavailable` or `ConfigError`."""
        self._runtime = runtime
        namespace = runtime.settings.runtime.namespace
        component = runtime.namespace(namespace).component(self._component)
        info = await self._start_engine(component)
        self._card = card = msgspec.structs.replace(
            self._card,
            engine=info,
            block_tokens=info.block_tokens,
            context_tokens=min(self._card.context_tokens, info.context_tokens),
        )
        declare_worker_metrics(runtime.metrics, self._engine)
        metrics, now = runtime.metrics, runtime.clock.now
        self._names = VllmNames(metrics, self._engine, card.names[0], info, now)
        runtime.health.add_check("engine", self._engine_failure)
        self._engine.on_failure(self._on_engine_failed)
        self._own_engines = batched_engines(self._engine)
        runtime.health.add_limitation("kv_tiers", self._tier_problems)
        runtime.health.add_limitation("kv_events", self._event_problems)
        await self._start_publishers(f"{namespace}.{self._component}", info)
        endpoint = component.endpoint
        await self._open_prefill(component)
        capabilities = {
            "model": card.names[0],
            "engine": msgspec.to_builtins(info),
            "blocks": msgspec.to_builtins(block_identity(card)),
            LABELS_KEY: parse_labels(runtime.settings.engine.labels),
            SUPERVISOR_KEY: runtime.supervisor,
            **self._prefill.capabilities,
        }
        on_load_changed = self._load_publisher.on_load_changed
        self._endpoints += await self._prefill.serve(capabilities, on_load_changed)
        generate = await endpoint("generate").serve(self._generate, capabilities=capabilities)
        self._endpoints.append(generate)
        self._prefill.withdraw_after(generate)
        self._sleep = SleepEndpoint(
            runtime, self._engine, tuple(self._endpoints), self._load_model_adapters
        )
        self._endpoints.append(await self._sleep.serve(component, capabilities))
        handlers = self._small_endpoints(runtime)
        serves = (endpoint(name).serve(handle) for name, handle in handlers.items())
        self._endpoints += await run_all(*serves)
        self._is_announced = True
        await self._announce_adapters()
        await runtime.discovery.put(self._discovery_key(), msgspec.json.encode(self._card))
        return self._card

    def _small_endpoints(self, runtime: DistributedRuntime) -> dict[str, RequestHandler]:
        """Handlers of the endpoints that manage the worker, by name."""
        control = KvControl(self._own_engines, runtime.clock)
        if control.has_tiers:
            declare_tier_metrics(runtime.metrics, control)
        handlers: dict[str, RequestHandler] = {
            "set_role": self._set_role,
            "clear_kv_blocks": self._clear_kv_blocks,
            "kv_blocks": self._dump_kv_blocks,
            KV_ENDPOINT: control.handle,
        }
        return handlers

    async def _start_engine(self, component: Component) -> EngineInfo:
        info = await self._engine.start()
        if self._runtime.stand_by is not None:
            await answer_probe(self._engine)  # its first step takes longer
            await self._runtime.stand_by()
            self._check_role(self._runtime.settings.engine.role)
            self._runtime.role = worker_role(self._runtime.settings.engine.role)
        roles = ROLES_BY_NAME[self._runtime.settings.engine.role]
        self._features = info.features
        sends_events = any(
            type(rank).on_kv_events is not EngineRank.on_kv_events for rank in self._engine.ranks
        )
        problem = self._event_problems()
        if problem:
            log.warning("KV blocks are predicted", extra={"fields": {"reason": problem}})
        kv_events = info.kv_events and sends_events and not problem
        info = msgspec.structs.replace(info, roles=roles, kv_events=kv_events)
        adapters = self._engine.adapters
        if adapters is None:
            return info
        await self._serve_adapters(component, adapters)
        return msgspec.structs.replace(info, adapters=dict(adapters.paths))

    async def _serve_adapters(self, component: Component, adapters: LoraAdapters) -> None:
        """Take orders for adapters, then load those that the model has: no order is missed."""
        endpoint = component.endpoint(ADAPTERS_ENDPOINT)
        adapters.fetch = self._fetch_adapter
        handle = AdapterEndpoint(adapters, self._announce_adapters).handle
        model = {"model": self._card.names[0]}
        self._endpoints.append(await endpoint.serve(handle, capabilities=model))
        await self._load_model_adapters()

    async def _load_model_adapters(self) -> None:
        """Load the adapters that the workers of the model are to have."""
        if (adapters := self._engine.adapters) is not None:
            cards_prefix = self._discovery_key().removesuffix(self._runtime.instance_id)
            await load_model_adapters(adapters, self._runtime, self._card.names[0], cards_prefix)

    async def _open_prefill(self, component: Component) -> None:
        runtime, engine = self._runtime, self._engine
        if engine.kv_connector is None:
            own = self._own_engines
            self._prefill = await WorkerPrefill.open(runtime, component, engine, own)
        else:
            self._prefill = ConnectorPrefill(runtime, component, engine, engine.kv_connector)

    async def close(self, drain_s: float = 0.0) -> None:
        """Leave discovery, finish requests within `drain_s`, and stop the engine."""
        if self._is_announced:
            await self._sleep.close()
            await self._runtime.discovery.delete(self._discovery_key())
        await run_all(*(served.withdraw(drain_s) for served in self._endpoints))
        if hasattr(self, "_prefill"):  # else `attach` has failed before it
            await self._prefill.close()
        await self._tasks.close()
        for source in self._event_sources:
            await source.close()
        await self._engine.stop()

    async def _generate(self, payload: bytes, outgoing: ResponseWriter) -> None:
        if not payload:  # an empty payload is a probe
            outgoing.send(encode_probe_result(await answer_probe(self._engine)))
            return
        try:
            shared = outgoing.shared
            if shared is None:
                request = decode_request(payload)
            else:
                request = decode_shared_request(payload, shared)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"not a generate request: {error}") from error
        missing = [name for name in required_features(request) if name not in self._features]
        if missing:
            raise Unsupported(f"the engine of this worker does not support: {', '.join(missing)}")
        if request.structured is not None:
            form = request.structured.supported_by(self._features, resumed=request.resumed > 0)
            request = msgspec.structs.replace(request, structured=form)
        self._load_publisher.on_load_changed()
        prompt_tokens = len(request.token_ids) // TOKEN_BYTES
        instance = self._runtime.instance_id
        reply = CountedReply(outgoing.send, instance, self._names, prompt_tokens)
        outgoing.is_alive = partial(self._engine.has_request, reply)
        try:
            await self._prefill.generate(request, outgoing.context, reply)
        except CancelledError:
            self._prefill.on_request_cancelled(request)
            raise
        finally:
            outgoing.is_alive = None  # breaks the reference cycle with the reply
            self._load_publisher.on_load_changed()

    async def _clear_kv_blocks(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Empty the prefix cache and answer {"cleared": blocks} in msgpack."""
        del payload
        outgoing.send(msgspec.msgpack.encode({"cleared": await self._engine.clear_blocks()}))

    async def _set_role(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Change the roles of this worker to the role named by `payload`, in every record that
        tells them. Routers move its requests if it does not decode any more. Answers the name."""
        name = payload.decode("utf-8", "replace")
        roles = ROLES_BY_NAME.get(name)
        if roles is None:
            raise InvalidRequest(
                f"there is no role {name!r}", hint=f"known: {', '.join(ROLES_BY_NAME)}"
            )
        self._check_role(name)
        self._prefill.set_roles(roles)
        for rank in self._engine.ranks:
            if rank.timing_learner is not None:
                rank.timing_learner.restart()
        await self._announce_engine(roles=roles)
        await self._runtime.set_role(worker_role(name))
        outgoing.send(payload)

    def _check_role(self, name: str) -> None:
        kind = self._runtime.settings.engine.kind
        check_role(kind, name)
        if name != "both" and kind in ENGINES_WITH_CONNECTORS and not self._engine.kv_connector:
            raise InvalidRequest(
                f"this worker cannot have the role {name}: its engine started without a connector",
                hint="start it with the role prefill or decode, which may be changed later",
            )

    async def _announce_adapters(self) -> None:
        adapters = self._engine.adapters
        if adapters is not None and self._is_announced:
            features = (*self._features, *adapters.replaced)
            await self._announce_engine(adapters=dict(adapters.paths), features=features)
            paths = {adapter_name(adapter): path for adapter, path in adapters.paths.items()}
            self._runtime.report(adapters=paths)

    async def _announce_engine(self, **changes: Any) -> None:
        """Change fields of `EngineInfo` in every record that has them."""
        info = self._card.engine
        self._card = msgspec.structs.replace(
            self._card, engine=info and msgspec.structs.replace(info, **changes)
        )
        change = {"engine": msgspec.to_builtins(self._card.engine)}
        for served in self._endpoints:
            if served.capabilities.keys() >= change.keys():
                await served.announce(change)
        await self._runtime.discovery.put(self._discovery_key(), msgspec.json.encode(self._card))

    async def _dump_kv_blocks(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Send the content of the prefix cache as payloads of `kv_events`."""
        del payload
        for rank in self._engine.ranks:
            for part in encode_kv_event_payloads(rank.snapshot_kv_events()):
                outgoing.send(part)

    def _on_engine_failed(self) -> None:
        """Leave discovery after a failure of the engine, so that other workers get its requests."""
        self._tasks.start(self.close(), "leave")

    def _tier_problems(self) -> str:
        engines = (engine.tiers for engine in self._own_engines)
        problems = (tier.problem for tiers in engines for tier in tiers.tiers)
        return "; ".join(filter(None, dict.fromkeys(problems)))

    def _event_problems(self) -> str:
        problems = (rank.kv_problem for rank in self._engine.ranks)
        return "; ".join(filter(None, dict.fromkeys(problems)))

    def _engine_failure(self) -> str:
        failure = self._engine.failure
        return "" if failure is None else failure.message

    async def _start_publishers(self, component: str, info: EngineInfo) -> None:
        """Publish load and KV events below `component`, which is "namespace.component"."""
        events, instance = self._runtime.events, self._runtime.instance_id
        model = self._card.names[0]
        subject = model_subject(component, LOAD_METRICS_SUBJECT, model)
        load = await events.open_source(subject, instance, latest=True)
        self._event_sources.append(load)
        totals: Counter[str] = Counter()
        sources = self._engine.ranks if info.kv_events else ()
        for number, source in enumerate(sources):
            rank = number if len(sources) > 1 else None
            publisher = await KVPublisher.open(
                events,
                component,
                instance,
                source.snapshot_kv_events,
                model=model,
                rank=rank,
                totals=totals,
            )
            source.on_kv_events(partial(self._publish_events, source, publisher))
            stored_before = source.snapshot_kv_events()  # on disk, or in a shared store
            if stored_before:
                publisher.publish(stored_before)
            self._event_sources.append(publisher)
        if len(self._event_sources) > 1:
            declare_kv_publisher_metrics(self._runtime.metrics, totals)
        runtime = self._runtime
        core_wait = CoreWait().measure if isinstance(runtime.clock, SystemClock) else None
        self._load_publisher = LoadPublisher(
            self._engine, load, runtime.clock, runtime.loop_pauses, core_wait
        )
        self._tasks.start(self._load_publisher.run(), "load report")

    def _publish_events(
        self, source: EngineRank, publisher: KVPublisher, events: Sequence[KvEvent]
    ) -> None:
        """Publish events. Routers predict the blocks of a rank whose events have become useless,
        which it clears with its last one, because its publisher is closed."""
        publisher.publish(events)
        if type(events[-1]) is BlocksCleared and source.kv_problem:
            log.warning("KV blocks are predicted", extra={"fields": {"reason": source.kv_problem}})
            self._tasks.start(publisher.close(), "end of KV events")

    def _discovery_key(self) -> str:
        namespace = self._runtime.settings.runtime.namespace
        return model_card_key(namespace, self._card.names[0], self._runtime.instance_id)
