"""A worker: one engine, reachable. Serves `generate` and `files`, announces the model's card, and
publishes load and KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from dynamo.communication.events import Source
from dynamo.communication.requests import Outgoing
from dynamo.core.codec import ReplyWriter, decode_request
from dynamo.core.errors import ProtocolError
from dynamo.core.kv_events import event_payloads
from dynamo.core.labels import LABELS, read_labels
from dynamo.core.reply import Engine
from dynamo.core.tasks import Tasks, run_all
from dynamo.core.values import EngineInfo
from dynamo.inference.beat import beat, encode_beat
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.files import FileServer
from dynamo.inference.kv_publisher import KVPublisher, declare_publisher
from dynamo.inference.load_report import LoadReport
from dynamo.inference.ranked import by_rank
from dynamo.inference.worker_metrics import declare_metrics
from dynamo.models.card import block_identity

if TYPE_CHECKING:
    from dynamo.models.card import ModelCard
    from dynamo.runtime.component import Served
    from dynamo.runtime.distributed import DistributedRuntime


def card_key(namespace: str, model: str, instance: str) -> str:
    """Where a worker's card stands in discovery; a slash in the model's name is %2F."""
    return f"/{namespace}/models/{quote(model, safe='')}/{instance}"


def served_card(card: ModelCard, info: EngineInfo) -> ModelCard:
    """The card as this engine really serves the model."""
    return msgspec.structs.replace(
        card,
        engine=info,
        block_tokens=info.block_tokens,
        context_tokens=min(card.context_tokens, info.context_tokens),
    )


def tells_blocks(engine: Engine) -> bool:
    """Whether an engine tells what its prefix cache holds."""
    return type(engine).on_kv_events is not Engine.on_kv_events


class Worker:
    """Attach it once; `close` it, or let the process end."""

    def __init__(self, engine: Engine, card: ModelCard, *, component: str = "worker") -> None:
        self._engine = engine
        self._card = card
        self._component = component
        self._tasks = Tasks()
        self._served: list[Served] = []
        self._sources: list[Source | KVPublisher] = []

    async def attach(self, runtime: DistributedRuntime) -> ModelCard:
        """Start the engine, serve, announce; the card as announced. Raises `ModelUnavailable`,
        `ConfigError`."""
        self._runtime = runtime
        info = await self._engine.start()
        self._card = card = served_card(self._card, info)
        declare_metrics(runtime.metrics, self._engine)
        runtime.health.check("engine", self._ailing)
        for engine in self._batched:
            engine.on_failure(self._leave)
        component = runtime.namespace(runtime.settings.runtime.namespace).component(self._component)
        await self._publish(component.namespace.name)
        tokenizer = card.tokenizer
        files = FileServer({tokenizer.sha256: Path(tokenizer.path)}, runtime.clock)
        self._served.append(await component.endpoint("files").serve(files.handle))
        about = {
            "model": card.names[0],
            "engine": msgspec.to_builtins(info),
            "blocks": msgspec.to_builtins(block_identity(card)),
            LABELS: read_labels(runtime.settings.engine.labels),
        }
        self._served.append(
            await component.endpoint("generate").serve(self._generate, capabilities=about)
        )
        self._served.append(await component.endpoint("clear_kv_blocks").serve(self._clear))
        self._served.append(await component.endpoint("kv_blocks").serve(self._tell_blocks))
        await runtime.discovery.put(self._card_key(), msgspec.json.encode(card))
        return card

    async def close(self, drain_s: float = 0.0) -> None:
        """Leave discovery, finish what is in flight within `drain_s`, stop the engine."""
        await self._runtime.discovery.delete(self._card_key())
        await run_all(*(served.withdraw(drain_s) for served in self._served))
        await self._tasks.close()
        for source in self._sources:
            await source.close()
        await self._engine.stop()

    async def _generate(self, payload: bytes, outgoing: Outgoing) -> None:
        if not payload:  # a probe
            outgoing.send(encode_beat(await beat(self._engine)))
            return
        try:
            request = decode_request(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a generate request: {error}") from error
        self._report.touch()
        reply = ReplyWriter(outgoing.send, self._runtime.instance_id)
        outgoing.alive = partial(self._engine.holds, reply)
        try:
            await self._engine.generate(request, outgoing.context, reply)
        finally:
            outgoing.alive = None  # it knows of the reply, and the reply of it: a circle
            self._report.touch()

    async def _clear(self, payload: bytes, outgoing: Outgoing) -> None:
        """Forget the prefix cache; answers {"cleared": blocks} in msgpack."""
        del payload
        count = sum(engine.clear_blocks() for engine in self._batched)
        outgoing.send(msgspec.msgpack.encode({"cleared": count}))

    async def _tell_blocks(self, payload: bytes, outgoing: Outgoing) -> None:
        """What the prefix cache holds now, as payloads of `kv_events`."""
        del payload
        for part in event_payloads(self._engine.held_blocks()):
            outgoing.send(part)

    def _leave(self) -> None:
        """The engine is dead: let others have its requests."""
        self._tasks.start(self.close(), "leave")

    def _ailing(self) -> str:
        failures = (engine.failure for engine in self._batched)
        return next((failure.message for failure in failures if failure is not None), "")

    async def _publish(self, namespace: str) -> None:
        """Load and KV events, as `{namespace}.{component}.load_metrics` and `.kv_events`."""
        events, instance = self._runtime.events, self._runtime.instance_id
        subject = f"{namespace}.{self._component}"
        load = await events.source(f"{subject}.load_metrics", instance, latest=True)
        self._sources.append(load)
        published: Counter[str] = Counter()
        telling = [(rank, one) for rank, one in by_rank(self._engine) if tells_blocks(one)]
        for rank, one in telling:
            kv = await KVPublisher.open(
                events, subject, instance, one.held_blocks, rank=rank, published=published
            )
            one.on_kv_events(kv.publish)
            self._sources.append(kv)
        if telling:
            declare_publisher(self._runtime.metrics, published)
        self._report = LoadReport(self._engine, load, self._runtime.clock)
        self._tasks.start(self._report.run(), "load report")

    @property
    def _batched(self) -> Sequence[BatchedEngine]:
        return [one for _, one in by_rank(self._engine) if isinstance(one, BatchedEngine)]

    def _card_key(self) -> str:
        namespace = self._runtime.settings.runtime.namespace
        return card_key(namespace, self._card.names[0], self._runtime.instance_id)
