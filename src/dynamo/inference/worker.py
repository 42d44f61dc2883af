"""A worker: an engine that serves requests and publishes its model card, load and KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from dynamo.communication.events import EventSource
from dynamo.communication.requests import ResponseWriter
from dynamo.core.clock import Clock
from dynamo.core.codec import ReplyEncoder, decode_request, decode_shared_request
from dynamo.core.errors import DECODE_ERRORS, InvalidRequest, NotFound, ProtocolError
from dynamo.core.kv_events import encode_kv_event_payloads
from dynamo.core.labels import LABELS_KEY, parse_labels
from dynamo.core.reply import Engine
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import ROLES_BY_NAME, worker_role
from dynamo.inference.data_parallel import engines_by_rank
from dynamo.inference.disaggregation.worker_prefill import WorkerPrefill
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.kv_publisher import KVPublisher, declare_kv_publisher_metrics
from dynamo.inference.load_publisher import LoadPublisher
from dynamo.inference.probe import answer_probe, encode_probe_result
from dynamo.inference.worker_metrics import declare_worker_metrics
from dynamo.models.card import block_identity
from dynamo.runtime.supervisors import SUPERVISOR_KEY

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard
    from dynamo.runtime.component import ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime

FILE_CHUNK_BYTES = 256 << 10


class ModelFileServer:
    """Serves files by hash: a call with a sha256 in hex returns the file's bytes in order. Chunks
    are sent only while the caller's flow window has room."""

    def __init__(self, files: Mapping[str, Path], clock: Clock) -> None:
        self._files = files
        self._clock = clock

    async def handle(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Serve one call of the request plane. Raises `NotFound` for an unknown hash."""
        path = self._files.get(payload.decode("ascii", "replace"))
        if path is None:
            raise NotFound("this worker serves no file with that hash")
        file = await self._clock.offload(path.open, "rb")
        try:
            while chunk := await self._clock.offload(file.read, FILE_CHUNK_BYTES):
                await outgoing.wait_for_window()
                if not outgoing.send(chunk):
                    return
        finally:
            file.close()


def model_card_key(namespace: str, model: str, instance: str) -> str:
    """Return the discovery key of a worker's card. A slash in the model's name becomes %2F."""
    return f"/{namespace}/models/{quote(model, safe='')}/{instance}"


class EngineWorker:
    """Serves one engine. Call `attach` once, then `close` or end the process."""

    def __init__(self, engine: Engine, card: ModelCard, *, component: str = "worker") -> None:
        self._engine = engine
        self._card = card
        self._component = component
        self._tasks = BackgroundTasks()
        self._endpoints: list[ServedEndpoint] = []
        self._event_sources: list[EventSource | KVPublisher] = []

    async def attach(self, runtime: DistributedRuntime) -> ModelCard:
        """Start the engine, serve its endpoints and announce the card, which is returned. Raises
        `ModelUnavailable` or `ConfigError`."""
        self._runtime = runtime
        roles = ROLES_BY_NAME[runtime.settings.engine.role]
        info = msgspec.structs.replace(await self._engine.start(), roles=roles)
        self._card = card = msgspec.structs.replace(
            self._card,
            engine=info,
            block_tokens=info.block_tokens,
            context_tokens=min(self._card.context_tokens, info.context_tokens),
        )
        declare_worker_metrics(runtime.metrics, self._engine)
        runtime.health.add_check("engine", self._engine_failure)
        for engine in self._batched_engines:
            engine.on_failure(self._on_engine_failed)
        namespace = runtime.settings.runtime.namespace
        component = runtime.namespace(namespace).component(self._component)
        await self._start_publishers(f"{namespace}.{self._component}")
        tokenizer = card.tokenizer
        files = ModelFileServer({tokenizer.sha256: Path(tokenizer.path)}, runtime.clock)
        endpoint, add = component.endpoint, self._endpoints.append
        add(await endpoint("files").serve(files.handle))
        self._prefill = await WorkerPrefill.open(runtime, component, self._batched_engines)
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
        self._generate_endpoint = await endpoint("generate").serve(
            self._generate, capabilities=capabilities
        )
        add(self._generate_endpoint)
        add(await endpoint("set_role").serve(self._set_role))
        add(await endpoint("clear_kv_blocks").serve(self._clear_kv_blocks))
        add(await endpoint("kv_blocks").serve(self._dump_kv_blocks))
        await runtime.discovery.put(self._discovery_key(), msgspec.json.encode(card))
        return card

    async def close(self, drain_s: float = 0.0) -> None:
        """Leave discovery, finish requests within `drain_s`, and stop the engine."""
        await self._runtime.discovery.delete(self._discovery_key())
        await run_all(*(served.withdraw(drain_s) for served in self._endpoints))
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
        self._load_publisher.on_load_changed()
        reply = ReplyEncoder(outgoing.send, self._runtime.instance_id)
        outgoing.is_alive = partial(self._engine.has_request, reply)
        try:
            await self._engine.generate(request, outgoing.context, reply)
        finally:
            outgoing.is_alive = None  # breaks the reference cycle with the reply
            self._load_publisher.on_load_changed()

    async def _clear_kv_blocks(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Empty the prefix cache and answer {"cleared": blocks} in msgpack."""
        del payload
        count = sum(engine.clear_prefix_cache() for engine in self._batched_engines)
        outgoing.send(msgspec.msgpack.encode({"cleared": count}))

    async def _set_role(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Change the roles of this worker to the role named by `payload`. Requests in flight end
        here. Answers the name."""
        name = payload.decode("utf-8", "replace")
        roles = ROLES_BY_NAME.get(name)
        if roles is None:
            raise InvalidRequest(
                f"there is no role {name!r}", hint=f"known: {', '.join(ROLES_BY_NAME)}"
            )
        info = self._card.engine
        self._card = msgspec.structs.replace(
            self._card, engine=info and msgspec.structs.replace(info, roles=roles)
        )
        await self._generate_endpoint.announce({"engine": msgspec.to_builtins(self._card.engine)})
        await self._runtime.discovery.put(self._discovery_key(), msgspec.json.encode(self._card))
        await self._runtime.set_role(worker_role(name))
        outgoing.send(payload)

    async def _dump_kv_blocks(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Send the content of the prefix cache as payloads of `kv_events`."""
        del payload
        for part in encode_kv_event_payloads(self._engine.snapshot_kv_events()):
            outgoing.send(part)

    def _on_engine_failed(self) -> None:
        """Leave discovery after a failure of the engine, so that other workers get its requests."""
        self._tasks.start(self.close(), "leave")

    def _engine_failure(self) -> str:
        failures = (engine.failure for engine in self._batched_engines)
        return next((failure.message for failure in failures if failure is not None), "")

    async def _start_publishers(self, subject: str) -> None:
        """Publish load and KV events as `{subject}.load_metrics` and `{subject}.kv_events`."""
        events, instance = self._runtime.events, self._runtime.instance_id
        load = await events.open_source(f"{subject}.load_metrics", instance, latest=True)
        self._event_sources.append(load)
        totals: Counter[str] = Counter()
        for rank, engine in engines_by_rank(self._engine):
            if type(engine).on_kv_events is Engine.on_kv_events:
                continue  # this kind of engine has no events
            publisher = await KVPublisher.open(
                events, subject, instance, engine.snapshot_kv_events, rank=rank, totals=totals
            )
            engine.on_kv_events(publisher.publish)
            self._event_sources.append(publisher)
        if len(self._event_sources) > 1:
            declare_kv_publisher_metrics(self._runtime.metrics, totals)
        self._load_publisher = LoadPublisher(self._engine, load, self._runtime.clock)
        self._tasks.start(self._load_publisher.run(), "load report")

    @property
    def _batched_engines(self) -> Sequence[BatchedEngine]:
        return [
            engine
            for _, engine in engines_by_rank(self._engine)
            if isinstance(engine, BatchedEngine)
        ]

    def _discovery_key(self) -> str:
        namespace = self._runtime.settings.runtime.namespace
        return model_card_key(namespace, self._card.names[0], self._runtime.instance_id)
