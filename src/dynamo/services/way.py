"""The way from one model's processor to its workers: client, watch, health, policy, pipeline."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self

from dynamo.core.reply import Send
from dynamo.models.card import ModelCard
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.watch import Watch
from dynamo.scheduling.admission import Admission, Promise
from dynamo.scheduling.assembly import standard_pipeline
from dynamo.scheduling.health import Health
from dynamo.scheduling.router.loads import LoadView
from dynamo.services.agreement import Agreement
from dynamo.services.routing import Routing

WORKER = "worker"


class Way:
    """Made by `open`; `close` it when the model is served in another way."""

    def __init__(self, client: Client, send: Send, held: AsyncExitStack) -> None:
        self.client = client
        self.send = send
        self._held = held

    @classmethod
    async def open(
        cls, runtime: DistributedRuntime, watch: Watch, routing: Routing, card: ModelCard
    ) -> Self:
        """To the workers that serve the card's model. Raises `ConfigError`."""
        settings = runtime.settings.router
        async with AsyncExitStack() as held:
            endpoint = runtime.namespace().component(WORKER).endpoint("generate")
            client = await endpoint.client(Agreement(card).serves)
            held.push_async_callback(client.close)
            held.callback(watch.follow(client))
            health = Health(
                client,
                runtime.clock,
                runtime.rng,
                runtime.metrics,
                interval_s=settings.load_balancing.health_check_interval,
                threshold=settings.load_balancing.unhealthy_threshold,
            )
            held.push_async_callback(health.close)
            routed = await routing.open(card, client)
            held.push_async_callback(routed.close)
            admission = Admission(
                client,
                routed.policy,
                runtime.clock,
                Promise.of(settings),
                runtime.metrics,
            )
            held.callback(admission.close)
            held.callback(
                runtime.on_settings(lambda now: admission.keep_to(Promise.of(now.router)))
            )
            loads = LoadView(runtime.clock)
            loads.on_report(admission.reported)
            await loads.follow(runtime.events, client.path.rsplit(".", 1)[0])
            held.callback(loads.close)
            send = standard_pipeline(
                client,
                routed.policy,
                runtime.metrics,
                clock=runtime.clock,
                migration_limit=settings.migration_limit,
                health=health,
                admission=admission,
                observers=routed.observers,
            )
            health.start()
            return cls(client, send, held.pop_all())

    async def close(self) -> None:
        """Calls under way go on."""
        await self._held.aclose()
