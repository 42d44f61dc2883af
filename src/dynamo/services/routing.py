"""How this process routes: a policy for each model, what is remembered of its decisions, and the
answers to whoever asks for that."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from dynamo.core.settings import Settings
from dynamo.core.settings.schema_router import Router as RouterSettings
from dynamo.core.values import Load
from dynamo.models.card import ModelCard
from dynamo.runtime.client import Client
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.index.cache_view import NO_CACHE, CacheView
from dynamo.scheduling.index.view_metrics import declare_view
from dynamo.scheduling.router.adaptive.policy import ADAPTIVE
from dynamo.scheduling.router.explain.timeline import EVERY_S, Timeline
from dynamo.scheduling.router.explain.watch import RoutingWatch
from dynamo.scheduling.router.kv import KvPolicy
from dynamo.scheduling.router.loads import LoadView
from dynamo.scheduling.router.opening import KV, make_cost, open_policy
from dynamo.scheduling.router.policy import Observer, Policy
from dynamo.scheduling.router.prompt import prompt_reader
from dynamo.scheduling.router.remote.messages import CHOOSE, read_asked
from dynamo.scheduling.router.remote.remote import RemotePolicy
from dynamo.scheduling.router.replicas.follower import BookFollower
from dynamo.scheduling.router.replicas.replicas import Replicas
from dynamo.scheduling.router.selectors import make_selector
from dynamo.sdk.declare import spec_of
from dynamo.services.components import Router
from dynamo.services.index_view import open_view

COMPOSITE = "composite"
WATCHED = (KV, ADAPTIVE)
"""Modes whose decisions can be explained."""
LEAST_KNOWN_LAST = ("exact", "stale", "approximate", NO_CACHE)


def by_instance(views: Mapping[str, str]) -> dict[str, str]:
    """Of several data-parallel ranks the least that is known."""
    found: dict[str, str] = {}
    for name, view in views.items():
        instance = name.partition("/")[0]
        found[instance] = max(found.get(instance, view), view, key=LEAST_KNOWN_LAST.index)
    return found


class ModelRouting:
    """One model's policy with what hangs on it. `follower`: where others' requests are booked."""

    def __init__(
        self,
        policy: Policy,
        client: Client,
        *,
        loads: LoadView | None = None,
        replicas: Replicas | None = None,
        follower: BookFollower | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.policy = policy
        self.client = client
        self.follower = follower
        self.observers = observers
        self._loads = loads
        self._replicas = replicas

    @property
    def workers(self) -> Sequence[str]:
        """Ids of the instances that it chooses among."""
        return tuple(self.client.instances)

    @property
    def waiting(self) -> int:
        """Requests that are held for a better moment."""
        return len(self.policy.placement) if isinstance(self.policy, KvPolicy) else 0

    @property
    def loads(self) -> Mapping[str, Load]:
        """What workers reported last."""
        return self._loads.loads if self._loads is not None else {}

    def views(self) -> Mapping[str, str]:
        """How each worker's cache is known."""
        if isinstance(self.policy, RemotePolicy):
            return self.policy.views()
        if not isinstance(self.policy, KvPolicy):
            return {}
        placement = self.policy.placement
        return {book.name: placement.view.mode(book.name) for book in placement.fleet.books}

    def routers(self) -> Mapping[str, str]:
        """How each router of its own fares, where those choose."""
        return self.policy.routers() if isinstance(self.policy, RemotePolicy) else {}

    def weigh(self, settings: RouterSettings) -> None:
        """Score by these weights from now on, where weights decide."""
        if isinstance(self.policy, KvPolicy) and settings.policy == COMPOSITE:
            self.policy.placement.cost = make_cost(settings)

    async def close(self) -> None:
        """Route no more."""
        await self.policy.close()
        if self._replicas is not None:
            await self._replicas.close()
        if self._loads is not None:
            self._loads.close()


class Routing:
    """One for a process."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        """Raises `ConfigError` for a selector that cannot be had."""
        about = runtime.settings.router
        if about.mode == KV:
            make_selector(about.selector, about.temperature, runtime.rng)
        self._runtime = runtime
        self._models: dict[str, ModelRouting] = {}
        self._cache_views: dict[str, CacheView] = {}
        self.watch = RoutingWatch(
            runtime.clock, runtime.metrics, runtime.name, waiting=self._waiting
        )
        self.timeline = Timeline(self.watch)
        self._sampling = False
        runtime.on_settings(self._reloaded)
        if runtime.settings.router.mode == KV:
            declare_view(runtime.metrics, self._cache_views.values)

    @property
    def explains(self) -> bool:
        """Whether decisions are remembered in the mode that is set."""
        return self._runtime.settings.router.mode in WATCHED

    def _reloaded(self, settings: Settings) -> None:
        for one in self._models.values():
            one.weigh(settings.router)

    async def open(self, card: ModelCard, client: Client) -> ModelRouting:
        """Route a model's requests among `client`'s instances from now on, in place of what was
        open under its name (which stays open until it is closed). Raises `ConfigError`."""
        settings = self._runtime.settings.router
        if settings.mode == KV and settings.replicas:
            made = await self._remote(card, client)
        else:
            made = await self.own(card, client)
        self.add(card.name, made)
        return made

    def add(self, model: str, made: ModelRouting) -> None:
        """Keep samples of its workers from now on."""
        self._models[model] = made
        if self.explains and not self._sampling:
            self._sampling = True
            self._runtime.tasks.start(self._sample(), "routing samples")

    def views(self) -> Mapping[str, Mapping[str, str]]:
        """By model: how each worker's cache is known."""
        return {model: views for model, one in self._models.items() if (views := one.views())}

    def routers(self) -> Mapping[str, Mapping[str, str]]:
        """By model: how each router that is asked fares; empty where this process chooses."""
        return {model: found for model, one in self._models.items() if (found := one.routers())}

    async def _open_view(self, card: ModelCard, client: Client) -> CacheView | None:
        """What mode `kv` knows of the workers' caches; None in other modes."""
        if self._runtime.settings.router.mode != KV:
            return None
        component = client.path.rsplit(".", 1)[0]
        view = await open_view(self._runtime, card.block_tokens, component)
        self._cache_views[card.name] = view
        return view

    async def own(self, card: ModelCard, client: Client, *, asked: bool = False) -> ModelRouting:
        """Choose in this process, in step with the others. `asked`: by frontends, which send hashes
        in place of tokens, and tell the others what goes out themselves."""
        runtime = self._runtime
        policy = await open_policy(
            runtime.settings.router,
            client,
            runtime.events,
            runtime.clock,
            block_tokens=card.block_tokens,
            read=read_asked if asked else None,
            view=await self._open_view(card, client),
        )
        observers = (self.watch,) if self.explains else ()
        if not isinstance(policy, KvPolicy):
            return ModelRouting(policy, client, observers=observers)
        follower = BookFollower(policy.placement, runtime.clock, policy.look_again)
        replicas = Replicas(runtime.clock, runtime.instance_id, follower)
        if not asked:
            policy.replicas = replicas
        await replicas.start(runtime.events, self._subject(card))
        return ModelRouting(
            policy,
            client,
            loads=await self.follow_loads(policy, client),
            replicas=replicas,
            follower=follower,
            observers=observers,
        )

    async def follow_loads(self, policy: KvPolicy, client: Client) -> LoadView:
        """Workers' reports, into the policy's books."""
        loads = LoadView(self._runtime.clock)
        loads.on_report(policy.placement.fleet.reported)
        await loads.follow(self._runtime.events, client.path.rsplit(".", 1)[0])
        return loads

    async def _remote(self, card: ModelCard, client: Client) -> ModelRouting:
        """Ask a router of its own."""
        runtime = self._runtime
        component = runtime.namespace().component(spec_of(Router).name)
        replicas = Replicas(runtime.clock, runtime.instance_id)
        await replicas.start(runtime.events, self._subject(card))
        policy = RemotePolicy(
            client,
            await component.endpoint(CHOOSE).client(),
            replicas,
            prompt_reader(card.block_tokens),
            runtime.clock,
            block_tokens=card.block_tokens,
            metrics=runtime.metrics,
        )
        return ModelRouting(policy, client, observers=(self.watch,))

    def _subject(self, card: ModelCard) -> str:
        """Where routers tell each other what they send out."""
        return f"{self._runtime.settings.runtime.namespace}.router/{quote(card.name, safe='')}"

    def _waiting(self) -> int:
        waiting = 0
        for one in self._models.values():  # this runs once a request
            waiting += one.waiting
        return waiting

    async def _sample(self) -> None:
        """On every whole second, so that the samples of several processes can be laid together."""
        clock = self._runtime.clock
        while True:
            await clock.sleep(EVERY_S - clock.wall() % EVERY_S)
            models = self._models.values()
            self.watch.collector.workers = sum(len(one.workers) for one in models)
            self.timeline.sample(
                round(clock.wall() / EVERY_S) * EVERY_S,
                [name for one in models for name in one.workers],
                ChainMap(*(dict(one.loads) for one in models)),
                views=ChainMap(*(by_instance(one.views()) for one in models)),
                waiting=self._waiting(),
            )
