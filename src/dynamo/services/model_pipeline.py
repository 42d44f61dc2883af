"""The way from one model's processor to its workers: client, watch, health, policy, pipeline."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self

from dynamo.core.reply import SendRequest
from dynamo.models.card import ModelCard
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.admission import Admission, SloLimits
from dynamo.scheduling.pipeline import standard_pipeline
from dynamo.scheduling.router.load_view import LoadView
from dynamo.scheduling.worker_health import WorkerHealth
from dynamo.services.compatibility import CardCompatibility
from dynamo.services.routing import ProcessRouting

WORKER_COMPONENT = "worker"


class ModelPipeline:
    """Made by `open`; `close` it when the model is served in another way."""

    def __init__(self, client: Client, send: SendRequest, held: AsyncExitStack) -> None:
        self.client = client
        self.send = send
        self._resources = held

    @classmethod
    async def open(
        cls,
        runtime: DistributedRuntime,
        watch: FailureDetector,
        routing: ProcessRouting,
        card: ModelCard,
    ) -> Self:
        """To the workers that serve the card's model. Raises `ConfigError`."""
        settings = runtime.settings.router
        async with AsyncExitStack() as held:
            endpoint = runtime.namespace().component(WORKER_COMPONENT).endpoint("generate")
            client = await endpoint.client(CardCompatibility(card).accepts)
            held.push_async_callback(client.close)
            held.callback(watch.watch(client))
            health = WorkerHealth(
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
                SloLimits.from_settings(settings),
                runtime.metrics,
            )
            held.callback(admission.close)
            held.callback(
                runtime.on_settings_change(
                    lambda now: admission.update(SloLimits.from_settings(now.router))
                )
            )
            loads = LoadView(runtime.clock)
            loads.add_listener(admission.on_load_report)
            await loads.subscribe(runtime.events, client.path.rsplit(".", 1)[0])
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
        await self._resources.aclose()
