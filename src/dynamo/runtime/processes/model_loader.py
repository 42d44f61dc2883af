"""Models that are loaded when they are wanted: their workers start at the first request, and end
after a time without requests, or when another model needs the memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from urllib.parse import unquote

from dynamo.core.clock import Backoff, Clock
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.tasks import BackgroundTasks, wait_at_most
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.host_memory import HostMemory
from dynamo.runtime.processes.process_group import ProcessGroup
from dynamo.runtime.supervisors import WAITING, LoadRecord, LoadState

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Times and calls of workers are compared this often while a model is loaded or wanted."""
QUIET_S = 0.2
"""A model that has to leave gets no further requests as soon as frontends know of it, and is
stopped when its workers had no call for this time."""
RUN_SHARE = 0.25
"""A model in demand runs for this share of the time that its load took before it makes room."""
FIRST_RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""A model that could not be loaded is loaded again after these times at the earliest."""
FollowKeys = Callable[[Callable[[Mapping[str, bytes]], None]], None]
"""Calls its argument with the keys of frontends that have requests, now and after each change:
MODEL/FRONTEND, and their values."""


class OnDemandModel:
    """The state of a model that is loaded when it is wanted. Its children say whether it runs.

    `uses` has the value of the key in discovery of each frontend that has requests. `work` is the
    task that loads or unloads the model, `loading` what it starts. `shortage` is the memory that a
    wanted model waits for. From `leaves_since` on, the model gets no further requests.
    """

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.uses: Mapping[str, bytes] = {}
        self.used_at = self.loaded_at = self.called_at = now
        self.wanted_since: float | None = None
        self.leaves_since: float | None = None
        self.load_s = 0.0
        self.failure = self.shortage = ""
        self.retry_at = self.backoff_s = 0.0
        self.backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        self.work: asyncio.Task[None] | None = None
        self.loading: Sequence[ChildSpec] = ()

    @property
    def busy(self) -> bool:
        """Whether the model is being loaded or unloaded."""
        return self.work is not None and not self.work.done()

    def may_be_preempted(self, now: float) -> bool:
        """Whether a model with requests has served those that came before its load, and has run for
        a while."""
        least_s = RUN_SHARE * self.load_s
        return WAITING not in self.uses.values() and now - self.loaded_at >= least_s

    def fail(self, reason: str, now: float) -> None:
        """Note that the model could not be loaded."""
        self.failure, self.backoff_s = reason, self.backoff.next_s()
        self.retry_at = now + self.backoff_s
        fields = {"model": self.name, "reason": reason, "retry_s": self.backoff_s}
        log.error("a model cannot be loaded", extra={"fields": fields})

    def succeed(self, now: float, load_s: float) -> None:
        """Note that the model is loaded."""
        self.failure, self.load_s = "", load_s
        self.loaded_at = self.used_at = now
        self.backoff.reset()


class ModelLoader:
    """Loads and unloads the models of a supervisor that are on demand.

    Models that wait for memory are served in the order in which they were wanted. Those that were
    used least recently make room. If none is idle, a model makes room that has served what had
    waited for its load, and has run for a share of the time of that: it gets no further requests,
    and ends when those in flight have ended. At most half of the models come and go like that at
    once: if all did, each would wait for the run of another one, too.
    """

    def __init__(
        self,
        group: ProcessGroup,
        memory: HostMemory,
        clock: Clock,
        tasks: BackgroundTasks,
        follow_keys: FollowKeys,
        on_change: Callable[[], None],
    ) -> None:
        self._group = group
        self._memory = memory
        self._clock = clock
        self._tasks = tasks
        self._follow_keys = follow_keys
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._models: dict[str, OnDemandModel] = {}
        self._uses: dict[str, dict[str, bytes]] = {}
        self.records: dict[str, LoadRecord] = {}

    def add(self, specs: Iterable[ChildSpec]) -> None:
        """Load and unload the models of these processes that are on demand."""
        for spec in specs:
            if spec.on_demand and spec.model not in self._models:
                model = self._models[spec.model] = OnDemandModel(spec.model, self._clock.now())
                model.uses = self._uses.get(spec.model, {})
                self.records[spec.model] = LoadRecord(embeds=spec.embeds)
        self._changed.set()

    def check_room(self, specs: Sequence[ChildSpec]) -> None:
        """Raise `ConfigError` for processes of a model that do not fit beside those that always
        run and the others of the model."""
        model, always = specs[0].model, self._always()
        always += [
            child.spec
            for child in self._group.children
            if child.spec.model == model and child.spec.on_demand and child.desired
        ]
        if any(spec.memory.own_bytes for spec in specs) and (
            lack := self._memory.lack_of(specs, always)
        ):
            workers = "a worker" if len(specs) == 1 else f"{len(specs)} workers"
            raise ConfigError(
                f"no room for {workers} of {model} beside what is always loaded: {lack}",
                hint="give each less with --memory, or remove other workers or models",
                param="model.memory",
            )

    def spare_bytes(self) -> int:
        """Return the memory that nothing needs when all models are loaded, at least 1; 0 without a
        limit."""
        models = map(self._group.specs_of_model, self._models)
        return self._memory.spare_bytes([*self._always(), *chain.from_iterable(models)])

    def forget(self, name: str) -> None:
        """Forget a model that is removed. Its processes stay."""
        model = self._models.pop(name, None)
        self.records.pop(name, None)
        if model is not None and model.work is not None:
            model.work.cancel()

    def set_uses(self, state: Mapping[str, bytes]) -> None:
        """Follow the keys of frontends that have requests: MODEL/FRONTEND, and their values."""
        self._uses = {}
        for key, value in state.items():
            quoted, _, frontend = key.rpartition("/")
            self._uses.setdefault(unquote(quoted), {})[frontend] = value
        for name, model in self._models.items():
            model.uses = self._uses.get(name, {})
        self._changed.set()

    def on_child_change(self) -> None:
        """Look at the models again, since a process changed."""
        self._changed.set()

    async def run(self) -> None:
        """Load and unload models until cancelled."""
        while not self._models:
            self._changed.clear()
            await self._changed.wait()
        self._follow_keys(self.set_uses)
        while True:
            self._changed.clear()
            self.settle()
            ticks = any(map(self._needs_ticks, self._models.values()))
            await wait_at_most(self._changed.wait(), TICK_S if ticks else None)

    def settle(self) -> None:
        """Start to load and unload what is to be by now, and announce the states."""
        now = self._clock.now()
        for model in self._models.values():
            self._follow(model, now)
        self._load_wanted(now)
        self._relieve()
        for model in self._models.values():
            self._leave(model, now)
        records = {name: self._describe(model, now) for name, model in self._models.items()}
        if records != self.records:
            self.records = records
            self._on_change()

    def _needs_ticks(self, model: OnDemandModel) -> bool:
        return bool(model.uses or model.busy or model.failure or self._children(model))

    def _children(self, model: OnDemandModel) -> Sequence[ChildProcess]:
        return [child for child in self._group.children if child.spec.model == model.name]

    def _is_loaded(self, model: OnDemandModel) -> bool:
        children = self._children(model)
        return any(child.desired and (child.ready or child.sleeping) for child in children)

    def _follow(self, model: OnDemandModel, now: float) -> None:
        """Note what frontends and workers of a model do, and stop workers that cannot start."""
        children = self._children(model)
        if any(child.calls for child in children):
            model.called_at = model.used_at = now
        if model.uses:
            model.used_at = now
        if self._is_loaded(model) or not model.uses:
            model.wanted_since, model.shortage = None, ""
        elif model.wanted_since is None:
            model.wanted_since = now
        reasons = [child.crash_loop_reason or child.start_error for child in children]
        if not model.busy and not self._is_loaded(model) and any(reasons):
            model.fail(next(filter(None, reasons)), now)
            self._unload(model)

    def _load_wanted(self, now: float) -> None:
        """Load models in the order in which they were wanted, the next one when it has room."""
        wanted = [
            model
            for model in self._models.values()
            if model.wanted_since is not None and now >= model.retry_at
        ]
        ready = [model for model in wanted if not model.busy and not self._children(model)]
        for model in sorted(ready, key=lambda model: model.wanted_since or 0.0):
            specs = self._group.specs_of_model(model.name)
            if lack := self._memory.lack_of(specs, self._processes()):
                self._make_room(model, specs, lack, now)
                break
            model.shortage, model.loading = "", specs
            model.work = self._tasks.start(self._load(model), f"load {model.name}")
        if not any(model.shortage for model in wanted):
            for model in self._models.values():
                model.leaves_since = None  # none waits for its memory any more

    def _processes(self, leaving: Container[str] = ()) -> list[ChildSpec]:
        """Return the processes that run, leave or are about to start, without those of models that
        are `leaving`."""
        specs = {child.spec.name: child.spec for child in self._group.children}
        starting = [spec for model in self._models.values() for spec in model.loading]
        specs |= {spec.name: spec for spec in starting}
        return [spec for spec in specs.values() if spec.model not in leaving]

    def _always(self) -> list[ChildSpec]:
        """Return the processes that stay whatever is wanted. A removed model has none."""
        children = [child for child in self._group.children if child.desired]
        specs = {child.spec.name: child.spec for child in children if not child.spec.on_demand}
        return list(specs.values())

    def _make_room(
        self, wanted: OnDemandModel, specs: Sequence[ChildSpec], lack: str, now: float
    ) -> None:
        """Let as many models leave as a wanted one needs, those that were used least recently
        first. If all of them would not be enough, the wanted one cannot be loaded."""
        if lack_alone := self._memory.lack_of(specs, self._always()):
            wanted.shortage = ""
            wanted.fail(lack_alone, now)
            return
        wanted.shortage = lack
        others = [model for model in self._models.values() if model.busy or self._children(model)]
        leaving = {model.name for model in others if self._is_leaving(model)}
        loaded = [model for model in others if not model.busy and self._is_loaded(model)]
        staying = [model for model in loaded if model.name not in leaving]
        idle = [model for model in staying if not model.uses and model.used_at < now]
        moving = [model for model in others if model.busy or model.name in leaving]
        preempted = [model for model in staying if model.uses and model.may_be_preempted(now)]
        if len(moving) >= max(1, len(others) // 2):
            preempted = []
        for model in [
            *sorted(idle, key=lambda model: model.used_at),
            *sorted(preempted, key=lambda model: model.loaded_at),
        ]:
            if not self._memory.lack_of(specs, self._processes(leaving)):
                return
            leaving.add(model.name)
            fields = {"model": model.name, "for": wanted.name, "lack": lack}
            log.info("a model makes room for another one", extra={"fields": fields})
            if model.uses:
                model.leaves_since = now
            else:
                self._unload(model)

    def _relieve(self) -> None:
        """Let idle models leave, those that were used least recently first, while what runs has
        more than its memory: a model was added that is always loaded."""
        models = self._models.values()
        leaving = {
            model.name
            for model in models
            if (model.busy and not model.loading) or self._is_leaving(model)
        }
        idle = [model for model in models if not (model.busy or model.uses)]
        for model in sorted(filter(self._is_loaded, idle), key=lambda model: model.used_at):
            if not self._memory.lack_of((), self._processes(leaving)):
                return
            leaving.add(model.name)
            self._unload(model)

    def _is_leaving(self, model: OnDemandModel) -> bool:
        if model.leaves_since is not None:
            return True
        return not model.loading and not any(child.desired for child in self._children(model))

    def _leave(self, model: OnDemandModel, now: float) -> None:
        """Unload a model that has been idle for its time, or has to leave and ends no request."""
        if model.busy or not self._is_loaded(model):
            return
        if model.leaves_since is not None:
            for child in self._children(model):
                child.request_calls()
            if now - max(model.leaves_since, model.called_at) >= QUIET_S:
                self._unload(model)
            return
        keep_alive_s = self._children(model)[0].spec.settings.model.keep_alive
        is_idle = not model.uses and model.called_at < now
        if is_idle and now - model.used_at >= keep_alive_s:
            self._unload(model)

    async def _load(self, model: OnDemandModel) -> None:
        started = self._clock.now()
        try:
            await self._group.start_model(model.loading, lambda _: None)
        except DynamoError as error:
            await self._group.stop_model(model.name, lambda _: None)
            model.fail(error.message, self._clock.now())
        else:
            now = self._clock.now()
            model.succeed(now, now - started)
            fields = {"model": model.name, "seconds": round(now - started, 2)}
            log.info("a model is loaded", extra={"fields": fields})
        finally:
            model.loading = ()
            self._changed.set()

    def _unload(self, model: OnDemandModel) -> None:
        """Let a model leave that is idle, or cannot start."""
        work = self._stop(model)  # a model that can sleep would be put to sleep here first
        model.work = self._tasks.start(work, f"unload {model.name}")

    async def _stop(self, model: OnDemandModel) -> None:
        try:
            await self._group.stop_model(model.name, lambda _: None)
        finally:
            model.leaves_since = None
            self._changed.set()
        log.info("a model is unloaded", extra={"fields": {"model": model.name}})

    def _describe(self, model: OnDemandModel, now: float) -> LoadRecord:
        state: LoadState = "unloaded"
        reason, backoff_s = model.shortage, 0.0
        if model.leaves_since is not None:
            state, reason = "leaving", "it makes room for another model"
        elif self._is_loaded(model):
            state = "loaded"
        elif model.loading or any(child.desired for child in self._children(model)):
            state, reason = "loading", "its workers start"
        elif model.failure:
            state, reason = "failed", model.failure
            backoff_s = model.backoff_s if now < model.retry_at else 0.0
        embeds = self.records[model.name].embeds
        return LoadRecord(state, reason, round(model.load_s, 2), backoff_s, embeds)
