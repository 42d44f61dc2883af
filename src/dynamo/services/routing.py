"""How this process routes: a policy for each model, what is remembered of its decisions, and the
answers to whoever asks for that."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from dynamo.core.settings import Settings
from dynamo.core.values import Load
from dynamo.models.card import ModelCard
from dynamo.runtime.calls.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.index.cache_view import NO_PREFIX_CACHE, CacheView
from dynamo.scheduling.index.cache_view_metrics import declare_cache_view_metrics
from dynamo.scheduling.router.explain.recorder import RoutingRecorder
from dynamo.scheduling.router.explain.timeline import SAMPLE_INTERVAL_S, RoutingTimeline
from dynamo.scheduling.router.factory import KV, PolicyInputs, connect_replicas, open_policy
from dynamo.scheduling.router.load_view import LoadView
from dynamo.scheduling.router.policies.adaptive import ADAPTIVE
from dynamo.scheduling.router.policies.remote import RemotePolicy
from dynamo.scheduling.router.policies.remote_messages import CHOOSE_ENDPOINT, read_query_prompt
from dynamo.scheduling.router.policy import Observer, Policy
from dynamo.scheduling.router.prompt import make_prompt_reader
from dynamo.scheduling.router.replicas.peer_requests import PeerRequests
from dynamo.scheduling.router.replicas.sync import ReplicaSync
from dynamo.scheduling.router.selectors import make_selector
from dynamo.sdk.decorators import spec_of
from dynamo.services.cache_views import open_cache_view
from dynamo.services.components import Router

EXPLAINABLE_MODES = (KV, ADAPTIVE)
"""Modes whose decisions can be explained."""
VIEW_MODES_BEST_FIRST = ("exact", "stale", "approximate", NO_PREFIX_CACHE)


def worst_view_by_instance(views: Mapping[str, str]) -> dict[str, str]:
    """Of several data-parallel ranks the least that is known."""
    found: dict[str, str] = {}
    for name, view in views.items():
        instance = name.partition("/")[0]
        found[instance] = max(found.get(instance, view), view, key=VIEW_MODES_BEST_FIRST.index)
    return found


class ModelRouting:
    """One model's policy with what hangs on it. `follower`: where others' requests are booked."""

    def __init__(
        self,
        policy: Policy,
        client: Client,
        *,
        loads: LoadView | None = None,
        replicas: ReplicaSync | None = None,
        routing_listener: PeerRequests | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.policy = policy
        self.client = client
        self.routing_listener = routing_listener
        self.observers = observers
        self._loads = loads
        self._replicas = replicas

    @property
    def worker_ids(self) -> Sequence[str]:
        """Ids of the instances that it chooses among."""
        return tuple(self.client.instances)

    @property
    def queued_requests(self) -> int:
        """Requests that are held for a better moment."""
        return self.policy.waiting

    @property
    def loads(self) -> Mapping[str, Load]:
        """What workers reported last."""
        return self._loads.loads if self._loads is not None else {}

    def view_modes(self) -> Mapping[str, str]:
        """How each worker's cache is known."""
        return self.policy.cache_view_modes()

    def router_states(self) -> Mapping[str, str]:
        """How each router of its own fares, where those choose."""
        return self.policy.router_states()

    async def close(self) -> None:
        """Route no more."""
        await self.policy.close()
        if self._replicas is not None:
            await self._replicas.close()
        if self._loads is not None:
            self._loads.close()


class ProcessRouting:
    """One for a process."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        """Raises `ConfigError` for a selector that cannot be had."""
        about = runtime.settings.router
        if about.mode == KV:
            make_selector(about.selector, about.temperature, runtime.rng)
        self._runtime = runtime
        self._models: dict[str, ModelRouting] = {}
        self._cache_views: dict[str, CacheView] = {}
        self.observer = RoutingRecorder(
            runtime.clock, runtime.metrics, runtime.name, waiting=self._queued_requests
        )
        self.timeline = RoutingTimeline(self.observer)
        self._sampling_started = False
        runtime.on_settings_change(self._update_settings)
        if runtime.settings.router.mode == KV:
            declare_cache_view_metrics(runtime.metrics, self._cache_views.values)

    @property
    def records_decisions(self) -> bool:
        """Whether decisions are remembered in the mode that is set."""
        return self._runtime.settings.router.mode in EXPLAINABLE_MODES

    def _update_settings(self, settings: Settings) -> None:
        for one in self._models.values():
            one.policy.update_settings(settings.router)

    async def open(self, card: ModelCard, client: Client) -> ModelRouting:
        """Route a model's requests among `client`'s instances from now on, in place of what was
        open under its name (which stays open until it is closed). Raises `ConfigError`."""
        settings = self._runtime.settings.router
        if settings.mode == KV and settings.replicas:
            made = await self._open_remote(card, client)
        else:
            made = await self.open_local(card, client)
        self.add_model(card.name, made)
        return made

    def add_model(self, model: str, made: ModelRouting) -> None:
        """Keep samples of its workers from now on."""
        self._models[model] = made
        if self.records_decisions and not self._sampling_started:
            self._sampling_started = True
            self._runtime.tasks.start(self._sample_every_second(), "routing samples")

    def view_modes(self) -> Mapping[str, Mapping[str, str]]:
        """By model: how each worker's cache is known."""
        return {model: views for model, one in self._models.items() if (views := one.view_modes())}

    def router_states(self) -> Mapping[str, Mapping[str, str]]:
        """By model: how each router that is asked fares; empty where this process chooses."""
        return {
            model: found for model, one in self._models.items() if (found := one.router_states())
        }

    async def _open_cache_view(self, card: ModelCard, client: Client) -> CacheView | None:
        """What mode `kv` knows of the workers' caches; None in other modes."""
        if self._runtime.settings.router.mode != KV:
            return None
        component = client.path.rsplit(".", 1)[0]
        view = await open_cache_view(self._runtime, card.block_tokens, component)
        self._cache_views[card.name] = view
        return view

    async def open_local(
        self, card: ModelCard, client: Client, *, standalone: bool = False
    ) -> ModelRouting:
        """Choose in this process, in step with the others. `asked`: by frontends, which send hashes
        in place of tokens, and tell the others what goes out themselves."""
        runtime = self._runtime
        policy = await open_policy(
            PolicyInputs(
                runtime.settings.router,
                client,
                runtime.events,
                runtime.clock,
                block_tokens=card.block_tokens,
                read_prompt=read_query_prompt if standalone else None,
                view=await self._open_cache_view(card, client),
            )
        )
        observers = (self.observer,) if self.records_decisions else ()
        connected = connect_replicas(
            policy, runtime.clock, runtime.instance_id, publish=not standalone
        )
        if connected is None:
            return ModelRouting(policy, client, observers=observers)
        replicas, follower = connected
        await replicas.start(runtime.events, self._routing_subject(card))
        return ModelRouting(
            policy,
            client,
            loads=await self.follow_loads(policy, client),
            replicas=replicas,
            routing_listener=follower,
            observers=observers,
        )

    async def follow_loads(self, policy: Policy, client: Client) -> LoadView:
        """Pass the load reports of workers to the policy's worker states."""
        loads = LoadView(self._runtime.clock)
        if policy.worker_states is not None:
            loads.add_listener(policy.worker_states.on_load_report)
        await loads.subscribe(self._runtime.events, client.path.rsplit(".", 1)[0])
        return loads

    async def _open_remote(self, card: ModelCard, client: Client) -> ModelRouting:
        """Ask a router of its own."""
        runtime = self._runtime
        component = runtime.namespace().component(spec_of(Router).name)
        replicas = ReplicaSync(runtime.clock, runtime.instance_id)
        await replicas.start(runtime.events, self._routing_subject(card))
        policy = RemotePolicy(
            client,
            await component.endpoint(CHOOSE_ENDPOINT).client(),
            replicas,
            make_prompt_reader(card.block_tokens),
            runtime.clock,
            block_tokens=card.block_tokens,
            metrics=runtime.metrics,
        )
        return ModelRouting(policy, client, observers=(self.observer,))

    def _routing_subject(self, card: ModelCard) -> str:
        """Where routers tell each other what they send out."""
        return f"{self._runtime.settings.runtime.namespace}.router/{quote(card.name, safe='')}"

    def _queued_requests(self) -> int:
        waiting = 0
        for one in self._models.values():  # this runs once a request
            waiting += one.queued_requests
        return waiting

    async def _sample_every_second(self) -> None:
        """On every whole second, so that the samples of several processes can be laid together."""
        clock = self._runtime.clock
        while True:
            await clock.sleep(SAMPLE_INTERVAL_S - clock.wall() % SAMPLE_INTERVAL_S)
            models = self._models.values()
            self.observer.collector.workers = sum(len(one.worker_ids) for one in models)
            self.timeline.record(
                round(clock.wall() / SAMPLE_INTERVAL_S) * SAMPLE_INTERVAL_S,
                [name for one in models for name in one.worker_ids],
                ChainMap(*(dict(one.loads) for one in models)),
                views=ChainMap(*(worst_view_by_instance(one.view_modes()) for one in models)),
                waiting=self._queued_requests(),
            )
