"""The LoRA adapters of a supervisor's models, which requests and commands load and unload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

from dynamo.core.adapters import AdapterOrder, parse_lora_modules
from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError, NotFound, Unsupported, WorkerFailed, decode_error
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.parent_pipe import ChildOrder
from dynamo.runtime.processes.process_group import ProcessGroup

POLL_S = 0.05


class ServedAdapters:
    """The folders of adapters by model and name.

    Workers report what they have loaded. What the first of them has loaded or unloaded, workers
    that start later are to have or to lack, too: `on_change` announces it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        models: Iterable[str],
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._group = group
        self._models = models
        self._clock = clock
        self._on_change = on_change
        self._changes: dict[str, dict[str, str]] = {}
        """By model, what differs from the settings; "": it was unloaded."""
        self._reported: dict[int, dict[str, str]] = {}
        self._numbers = count(1)
        self._lock = asyncio.Lock()

    def of_model(self, model: str) -> dict[str, str]:
        """Return the folder of each adapter that workers of a model are to have, and "" for those
        of its settings that they are to lack."""
        return self._declared(model) | self._changes.get(model, {})

    def of_models(self) -> dict[str, dict[str, str]]:
        """Return the result of `of_model` for each model that has one."""
        return {model: own for model in self._models if (own := self.of_model(model))}

    def loaded(self, model: str) -> dict[str, str]:
        """Return the folder of each adapter that workers of a model are to have."""
        return {name: path for name, path in self.of_model(model).items() if path}

    def parent_of(self, name: str) -> str:
        """Return the model that has an adapter of this name, "" if none has."""
        return next((model for model in self._models if name in self.loaded(model)), "")

    def on_report(self, child: ChildProcess) -> None:
        """Learn what a worker has loaded and unloaded since its last report."""
        adapters, known = child.report.adapters, self._reported.get(child.pid)
        if adapters is None or adapters == known:
            return
        running = {each.pid for each in self._group.children}
        self._reported = {pid: own for pid, own in self._reported.items() if pid in running}
        self._reported[child.pid] = adapters
        known, model = known or {}, child.spec.model
        for name, path in adapters.items():
            if known.get(name) != path:
                self._set(model, name, path)
        for name in known.keys() - adapters.keys():
            self._set(model, name, "")
        self._on_change()

    def _set(self, model: str, name: str, path: str) -> None:
        changes = self._changes.setdefault(model, {})
        if path == self._declared(model).get(name, ""):
            changes.pop(name, None)
        else:
            changes[name] = path
        if not changes:
            del self._changes[model]

    def _declared(self, model: str) -> dict[str, str]:
        specs = self._group.specs_of_model(model)
        return dict(parse_lora_modules(specs[0].settings.engine.lora_modules)) if specs else {}

    def forget(self, model: str) -> None:
        """Forget the adapters of a removed model."""
        self._changes.pop(model, None)

    async def load(self, name: str, path: str, model: str) -> bool:
        """Have all workers of a model load an adapter, or those that start later if none serves
        now. Returns whether one does. Raises their error."""
        serves = any(child.ready and child.spec.model == model for child in self._group.children)
        if serves:
            await self._execute(AdapterOrder(name, path, model=model))
        else:
            self._set(model, name, path)
            self._on_change()
        return serves

    async def unload(self, name: str, model: str) -> None:
        """Have all workers of a model unload an adapter, also one that no worker has now."""
        try:
            await self._execute(AdapterOrder(name, model=model))
        except (NotFound, Unsupported):
            self._set(model, name, "")
            self._on_change()

    async def _execute(self, order: AdapterOrder) -> None:
        """Let a frontend send an order to the workers of all hosts. Raises their error."""
        async with self._lock:
            frontends = (child for child in self._group.children if child.spec.role == "frontend")
            frontend = next((child for child in frontends if child.ready), None)
            if frontend is None:
                raise WorkerFailed(
                    "no frontend runs here that could send the order to the workers",
                    hint="run the command where the deployment's frontends run",
                )
            number, pid = next(self._numbers), frontend.pid
            frontend.send_order(ChildOrder(number, order))
            while frontend.report.answered != number:
                if frontend.pid != pid:
                    raise WorkerFailed("the frontend that sent the order has died")
                await self._clock.sleep(POLL_S)
            if frontend.report.refused:
                error: DynamoError = decode_error(frontend.report.refused)
                raise error
