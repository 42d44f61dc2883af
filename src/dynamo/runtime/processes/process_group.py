"""Changes the processes of a serving deployment: scale, drain, rolling restart. A process that is
replaced stops only after its replacement serves. A start does not wait for processes that drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, ModelUnavailable, NotFound
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.process_names import (
    DEFAULT_KIND,
    check_replicas,
    is_called,
    kind_called,
    kind_of_process,
    kind_of_spec,
    replica_spec,
    url_worker_kind,
    url_worker_spec,
)
from dynamo.runtime.processes.standby import restart_standbys, serving_instead
from dynamo.runtime.processes.tuned_settings import TunedSettings, Values, with_values

log = logging.getLogger(__name__)

KILL_GRACE_S = 5.0
"""A child that still runs this long after its drain time is killed."""
NOTICE_S = 0.02
"""Time between a notice and the signal to stop, which must not overtake it."""
URL_START_TIMEOUT_S = 60.0
"""A new worker of a server's URL that does not serve within this time is removed."""

ControlProgressCallback = Callable[[str], None]
"""Receives the progress of a control request as text."""


def _let_leave(children: Sequence[ChildProcess]) -> None:
    """Count these children no more among those that are to run, before they are stopped."""
    for child in children:
        child.stop_restarting()


class ProcessGroup:
    """Starts, stops and replaces children. `children` holds all of them in order of their start,
    at first without those that are on demand.
    `run_child` starts a task that keeps a child alive. `refresh_specs` calls `update_specs` if the
    settings changed. `require_space` raises if the disk has no room for another process, and
    `check_room` if the memory has none for these. `on_removed` is called when a child has left."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        create_child: Callable[[ChildSpec], ChildProcess],
        run_child: Callable[[ChildProcess], asyncio.Task[None]],
        drain_s: float,
        refresh_specs: Callable[[], Awaitable[object]],
        require_space: Callable[[], Awaitable[None]],
        check_room: Callable[[Sequence[ChildSpec]], None],
        on_removed: Callable[[], None],
    ) -> None:
        self._on_removed = on_removed
        self._require_space, self._check_room = require_space, check_room
        self._refresh_specs = refresh_specs
        self._create_child = create_child
        self._run_child = run_child
        self._drain_s = drain_s
        self._specs: dict[str, ChildSpec] = {}  # by kind
        self._specs_by_name: dict[str, ChildSpec] = {}
        self.tuned = TunedSettings()
        self.update_specs(specs)
        self._run_tasks: dict[ChildProcess, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()
        self._child_changed = asyncio.Event()
        self.children = [create_child(spec) for spec in specs if not spec.on_demand]

    def start(self) -> None:
        """Start all children."""
        for child in self.children:
            self._start_child(child)

    def on_child_change(self) -> None:
        """Wake requests that wait for a child to be ready."""
        self._child_changed.set()

    def update_specs(self, specs: Sequence[ChildSpec]) -> None:
        """Use these specs for children that are started later."""
        specs = self.tuned.apply(specs)
        self._specs |= {kind_of_process(spec.name): spec for spec in specs if not spec.standby}
        self._specs_by_name |= {spec.name: spec for spec in specs}

    async def _stop_leaving(
        self, leaving: Sequence[ChildProcess], progress: ControlProgressCallback
    ) -> None:
        """Stop and remove children whose clients can go to others. The caller has let them leave,
        and does not hold the lock."""
        if not leaving:
            return
        for child in leaving:
            child.notify_leaving()
        await asyncio.sleep(NOTICE_S)
        await self.stop_children(leaving)
        for child in leaving:
            self._remove_child(child)
            progress(f"{child.spec.name} has left")

    async def stop_children(self, leaving: Sequence[ChildProcess]) -> None:
        """Stop these children; those that run on after their drain time are killed."""
        for child in leaving:
            child.stop_restarting()
            child.send_signal(signal.SIGTERM)
        by_task = {self._run_tasks[child]: child for child in leaving}
        _, pending = await asyncio.wait(by_task, timeout=self._drain_s + KILL_GRACE_S)
        for task in pending:
            child = by_task[task]
            fields = {"name": child.spec.name, "instance": child.instance}
            log.error("process killed after its drain time", extra={"fields": fields})
            child.send_signal(signal.SIGKILL)
        if pending:
            await asyncio.wait(pending)

    async def scale(self, kind: str, count: int, progress: ControlProgressCallback) -> None:
        """Change the number of replicas of a kind. Unready ones leave first, then those with the
        fewest calls. Other requests are executed while replicas start or drain. Raises
        `NotFound`, `ConfigError`, also if new replicas do not fit into the memory, and
        `ModelUnavailable` if one cannot start or the disk is full."""
        added: Sequence[ChildProcess] | None = None
        while added is None:
            added = []
            async with self._lock:
                kind = self._kind_called(kind)
                replicas = self._children_of_kind(kind)
                check_replicas(kind, count)
                busiest_first = sorted(replicas, key=lambda child: (not child.ready, -child.calls))
                leaving = [child for child in replicas if child not in busiest_first[:count]]
                _let_leave(leaving)
                if len(replicas) < count:
                    await self._require_space()
                    added = self._add_replicas(kind, count - len(replicas))
            if added is None:
                await self._wait_for_departure(kind)
        if len(replicas) == count:
            progress(f"{kind}: {count} as before")
        await self._stop_leaving(leaving, progress)
        for child in added:
            await self._wait_until_ready(child)
            progress(f"{child.spec.name} serves")

    async def drain(self, name: str, progress: ControlProgressCallback) -> None:
        """Stop and remove a process. Raises `NotFound`."""
        async with self._lock:
            child = self._child_named(name)
            _let_leave([child])
        await self._stop_leaving([child], progress)

    async def add_url(
        self, url: str, model: str, kv_events: str, progress: ControlProgressCallback
    ) -> None:
        """Start a worker for the server at `url`. `model` is the model's name there, "" for its
        only one. `kv_events` is where the server publishes them, or "". Other requests are
        executed while the worker starts. Raises `ConfigError` if there are no workers, or one has
        the URL, and `ModelUnavailable` if it cannot start."""
        async with self._lock:
            kind = url_worker_kind(self._specs)
            if self._children_of_url(url):
                raise ConfigError(f"{url} is served already", hint="see `dynamo ps`")
            await self._require_space()
            spec = url_worker_spec(self._specs[kind], url, model, kv_events)
            child = self._start_new_child(replace(spec, name=next(self._free_names(kind))))
        await self._wait_until_ready(child)
        progress(f"{child.spec.name} serves {url}")

    async def remove_url(self, url: str, progress: ControlProgressCallback) -> None:
        """Stop and remove the workers of the server at `url`. Raises `NotFound`."""
        async with self._lock:
            children = self._children_of_url(url)
            if not children:
                known = sorted(
                    {url for child in self.children for url in child.spec.settings.engine.urls}
                )
                hint = f"the URLs are: {', '.join(known)}" if known else "no worker has a URL"
                raise NotFound(f"no worker serves {url}", hint=hint)
            _let_leave(children)
        await self._stop_leaving(children, progress)

    def count_workers(self) -> int:
        """Return the number of workers that are to run."""
        return sum(child.spec.role == DEFAULT_KIND for child in self._staying)

    def specs_of_model(self, model: str) -> Sequence[ChildSpec]:
        """Return the processes of a model as the settings have them."""
        return [spec for spec in self._specs_by_name.values() if spec.model == model]

    def require_new_names(self, specs: Sequence[ChildSpec]) -> None:
        """Raise `ConfigError` if a process of such a kind is there, or leaves."""
        kinds = self._specs.keys() | {kind_of_process(child.spec.name) for child in self.children}
        for spec in specs:
            if kind_of_process(spec.name) in kinds:
                raise ConfigError(
                    f"there is a process {spec.name} already",
                    hint="choose another --model-name, or wait until the old model has left",
                )

    async def start_model(
        self, specs: Sequence[ChildSpec], progress: ControlProgressCallback
    ) -> None:
        """Start the processes of another model, and wait until all serve. Raises as `scale`."""
        async with self._lock:
            await self._require_space()
            self.update_specs(specs)
            added = [self._start_new_child(spec) for spec in specs]
        for child in [child for child in added if not child.spec.standby]:
            await self._wait_until_ready(child)
            progress(f"{child.spec.name} serves")

    async def remove_model(self, model: str, progress: ControlProgressCallback) -> None:
        """Stop and remove all processes of a model, and forget it."""
        async with self._lock:
            for specs in (self._specs, self._specs_by_name):
                for name in [name for name, spec in specs.items() if spec.model == model]:
                    del specs[name]
        await self.stop_model(model, progress)

    async def stop_model(self, model: str, progress: ControlProgressCallback) -> None:
        """Stop and remove all processes of a model."""
        async with self._lock:
            leaving = [c for c in self.children if c.desired and c.spec.model == model]
            _let_leave(leaving)
        await self._stop_leaving(leaving, progress)

    def _children_of_url(self, url: str) -> list[ChildProcess]:
        return [child for child in self._staying if url in child.spec.settings.engine.urls]

    @property
    def _staying(self) -> list[ChildProcess]:
        """The children that are to serve."""
        return [child for child in self.children if child.desired and not child.spec.standby]

    async def restart(self, name: str, progress: ControlProgressCallback) -> None:
        """Replace a process, or all of a kind one after the other, by the present settings. Without
        a name, replace every worker, or every process of a graph, which has no workers. Each
        process drains after its replacement serves. Other requests are executed while replacements
        start. Raises `NotFound`, and `ModelUnavailable` if a replacement cannot start."""
        async with self._lock:
            await self._refresh_specs()
            named = [child for child in self._staying if is_called(child, name)]
            replaced = named or self._replaceable_children(name)
        for old in replaced:
            await self.replace_child(old, progress)
        restart_standbys(self.children, self._specs_by_name, replaced)

    def change_settings(self, kind: str, before: Values, after: Values) -> None:
        """Start children of a kind with other values of settings from now on."""
        self.tuned.change(kind, before, after)
        for specs in (self._specs, self._specs_by_name):
            for name, spec in specs.items():
                if kind_of_spec(spec) == kind:
                    specs[name] = with_values(spec, after)
        restart_standbys(self.children, self._specs_by_name)

    def replicas(self, name: str) -> Sequence[ChildProcess]:
        """Return the children of the kind of this name that are to serve. Raises `NotFound`."""
        return self._children_of_kind(self._kind_called(name))

    async def replace_child(
        self, old: ChildProcess, progress: ControlProgressCallback, values: Values | None = None
    ) -> None:
        """Replace a child by one with the present settings and `values`. Raises as `restart`."""
        async with self._lock:
            if not (old in self.children and old.desired):
                return
            spec = self._specs.get(kind_of_process(old.spec.name), old.spec)
            if old.spec.settings.engine.urls:
                spec = old.spec  # each has its own URL, which may not be in the settings
            spec = replica_spec(with_values(spec, values or {}), old.spec.name, self._specs_by_name)
            new = self._start_new_child(spec)
        await self._wait_until_ready(new)
        async with self._lock:
            old = serving_instead(old, new, self._staying)
            stays = old in self.children and old.desired
            leaving = [child for child in (old if stays else new,) if child.desired]
            _let_leave(leaving)  # the new one if another request has removed the old one
        await self._stop_leaving(leaving, lambda _: None)
        progress(f"{old.spec.name} was replaced")

    def _replaceable_children(self, kind: str) -> list[ChildProcess]:
        if kind or DEFAULT_KIND in self._specs:
            return self._children_of_kind(self._kind_called(kind) or DEFAULT_KIND)
        workers = [child for child in self._staying if child.spec.role == DEFAULT_KIND]
        return workers or self._staying

    def _add_replicas(self, kind: str, count: int) -> Sequence[ChildProcess] | None:
        """Start replicas; return None if they need the devices of others that drain."""
        replicas = self._children_of_kind(kind)
        spec = replicas[0].spec if replicas else self._specs[kind]
        free_names = self._free_names(kind)
        try:
            new_specs = [
                replica_spec(spec, next(free_names), self._specs_by_name) for _ in range(count)
            ]
        except ConfigError:
            if not self._leaving_of(kind):
                raise
            return None
        self._check_room(new_specs)
        return [self._start_new_child(new_spec) for new_spec in new_specs]

    def _free_names(self, kind: str) -> Iterator[str]:
        """Yield names of processes that do not exist."""
        used_names = {child.spec.name for child in self.children}
        names = (f"{kind}-{number}" for number in range(1, 1 << 20))
        return (name for name in names if name not in used_names)

    def _leaving_of(self, kind: str) -> list[asyncio.Task[None]]:
        """Return the tasks of children of a kind that drain."""
        return [
            self._run_tasks[child]
            for child in self.children
            if kind_of_process(child.spec.name) == kind and not child.desired
        ]

    async def _wait_for_departure(self, kind: str) -> None:
        """Wait until a child of a kind has left."""
        if tasks := self._leaving_of(kind):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # the request that stopped the child removes it

    def _start_new_child(self, spec: ChildSpec) -> ChildProcess:
        child = self._create_child(spec)
        self.children.append(child)
        self._start_child(child)
        return child

    def _start_child(self, child: ChildProcess) -> None:
        task = self._run_tasks[child] = self._run_child(child)
        task.add_done_callback(lambda _: self._child_changed.set())

    async def _wait_until_ready(self, child: ChildProcess) -> None:
        """Wait until a child serves. Removes a child that cannot start; raises
        `ModelUnavailable`. The caller does not hold the lock."""
        if reason := await self._wait_for_start(child):
            await self._remove_failed(child, reason)

    async def _wait_for_start(self, child: ChildProcess) -> str:
        """Wait until a child serves, and return "", or until it cannot start: return why."""
        task, urls = self._run_tasks[child], child.spec.settings.engine.urls
        try:
            async with asyncio.timeout(URL_START_TIMEOUT_S if urls else None):
                while not child.ready:
                    if task.done() or child.crash_loop_reason:
                        return child.report.fatal or child.crash_loop_reason or "it was stopped"
                    self._child_changed.clear()
                    await self._child_changed.wait()
        except TimeoutError:
            return f"{urls[0]} does not serve the model after {URL_START_TIMEOUT_S:g} s"
        return ""

    async def _remove_failed(self, child: ChildProcess, reason: str) -> None:
        """Remove a child that cannot start, unless a request did. Raises `ModelUnavailable`."""
        if child in self.children and child.desired:
            await self.stop_children([child])
            self._remove_child(child)
        hint = child.report.hint or "see its log; the other processes are unchanged"
        raise ModelUnavailable(f"{child.spec.name} cannot start: {reason}", hint=hint)

    def _remove_child(self, child: ChildProcess) -> None:
        if self._run_tasks.pop(child, None) is not None:  # else another request has removed it
            self.children.remove(child)
            self._on_removed()

    def _kind_called(self, name: str) -> str:
        specs = [*self._specs.values(), *(child.spec for child in self._staying)]
        return kind_called(name, {kind_of_process(spec.name): spec for spec in specs})

    def _children_of_kind(self, kind: str) -> list[ChildProcess]:
        children = [child for child in self._staying if kind_of_process(child.spec.name) == kind]
        spec = self._specs.get(kind)
        if not children and spec is None:
            raise self._not_found_error(kind)
        if not children and spec is not None and spec.on_demand:
            raise NotFound(
                f"no {kind} runs: {spec.model} is not loaded",
                hint="a request for it loads it; its workers start and end together",
            )
        return children

    def _child_named(self, name: str) -> ChildProcess:
        for child in self._staying:
            if is_called(child, name):
                return child
        raise self._not_found_error(name)

    def _not_found_error(self, name: str) -> NotFound:
        names = ", ".join(child.spec.name for child in self.children)
        return NotFound(f"no process is called {name!r}", hint=f"the processes are: {names}")
