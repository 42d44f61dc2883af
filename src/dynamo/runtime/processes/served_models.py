"""The models that a deployment is to serve, which commands add, remove and rename."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError, DynamoError, NotFound, nearest_name_hint
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.model_loader import ModelLoader
from dynamo.runtime.processes.process_group import ControlProgressCallback, ProcessGroup
from dynamo.runtime.processes.served_adapters import ServedAdapters
from dynamo.runtime.supervisors import removals_prefix

NOTICE_S = 1.0
"""Frontends learn of a removal within this time, and say for which model requests are in flight."""
FRONTENDS_S = 10.0
"""Commands wait so long for the frontends of the deployment to serve a model under a name."""
POLL_S = 0.05

MakeModelSpecs = Callable[[Mapping[str, Any], int, int], Awaitable[Sequence[ChildSpec]]]
"""Returns the processes of an entry of `models`, beside a number of other workers that leave some
memory (0: unknown). Raises `DynamoError`."""
SaveModel = Callable[[Mapping[str, Any] | None, str], Awaitable[str]]
"""Writes an entry into the settings file, deletes that of a name, or changes that of a name.
`adapters` changes its adapters, where the folder "" deletes one, and `alias` its names. Returns the
file."""


class ModelSources(msgspec.Struct, frozen=True):
    """The functions that make the processes of an added model and write it into the file."""

    make_specs: MakeModelSpecs
    save: SaveModel


class ModelStatus(msgspec.Struct, frozen=True):
    """A model as `dynamo models` shows it. `workers` serve, of `desired`. `adapters`: the folder
    of each LoRA adapter by name."""

    name: str
    aliases: Sequence[str]
    state: str
    workers: int
    desired: int
    engine: str
    path: str
    reason: str = ""
    adapters: Mapping[str, str] = {}


class ServedModels:
    """The models of a supervisor by id, each with its aliases, in order of the settings.

    `specs` are the processes of the start, and `loader` loads those models that are on demand.
    `on_change` announces them. `list_keys` returns the keys of discovery below a prefix. Models
    that only a server's URL names are not listed.
    """

    def __init__(
        self,
        group: ProcessGroup,
        loader: ModelLoader,
        specs: Sequence[ChildSpec],
        sources: ModelSources | None,
        namespace: str,
        drain_s: float,
        clock: Clock,
        *,
        on_change: Callable[[], None],
        list_keys: Callable[[str], Awaitable[Sequence[str]]],
    ) -> None:
        self._group = group
        self._loader = loader
        self._sources = sources
        self._namespace = namespace
        self._drain_s = drain_s
        self._clock = clock
        self._on_change = on_change
        self._list_keys = list_keys
        self._saving = asyncio.Lock()
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.adapters = ServedAdapters(group, self.aliases, clock, on_change)
        for spec in specs:
            self._list(spec)

    def _list(self, spec: ChildSpec) -> None:
        if spec.model:
            names = dict.fromkeys((spec.model, *spec.settings.model.names[1:]))
            self.aliases.setdefault(spec.model, tuple(names)[1:])

    async def add(
        self, entry: Mapping[str, Any], progress: ControlProgressCallback, *, save: bool
    ) -> None:
        """Start the workers of an entry of `models`, and wait until they serve. If one cannot
        start, all are stopped and the error is raised. A model on demand is only listed."""
        sources = self._require_sources()
        others, spare_bytes = self._group.count_workers(), self._loader.spare_bytes()
        specs = await sources.make_specs(entry, others, spare_bytes)
        spec = specs[0]
        for name in dict.fromkeys((spec.model, *spec.settings.model.names)):
            self._require_free(name)
        self._group.require_new_names(specs)
        self._loader.check_room(specs)
        self._list(spec)
        if spec.on_demand:
            self._group.update_specs(specs)
            self._loader.add(specs)
        self._on_change()
        try:
            if not spec.on_demand:
                await self._group.start_model(specs, progress)
            await self._wait_for_frontends(spec.model, spec.model)
        except BaseException:
            if spec.model in self.aliases:  # else a command has removed the model
                await asyncio.shield(self._forget(spec.model, progress))
            raise
        if spec.model not in self.aliases:
            raise NotFound(f"{spec.model} was removed while it was added")
        progress(f"{spec.model} is " + ("loaded when wanted" if spec.on_demand else "served"))
        if save:
            until = f"{spec.model} is served until the deployment ends"
            progress(f"{await self._save(entry, '', until)} has the model")

    async def remove(self, name: str, progress: ControlProgressCallback, *, save: bool) -> None:
        """Stop serving a model, or delete an alias. Requests in flight end before the workers stop.
        Raises `NotFound` and `ConfigError`."""
        if parent := self.adapters.parent_of(name):
            await self.adapters.unload(name, parent)
            progress(f"{name}, an adapter of {parent}, is removed")
            if save:
                until = f"{name} is removed until the deployment starts again"
                file = await self._save({"adapters": {name: ""}}, parent, until)
                progress(f"{file} lacks the adapter")
            return
        if (owner := self._owner_of(name)) is not None and owner != name:
            self.aliases[owner] = tuple(alias for alias in self.aliases[owner] if alias != name)
            self._on_change()
            progress(f"{name} was an alias of {owner}, which is served on")
            if save:
                until = f"{name} is removed until the deployment starts again"
                progress(f"{await self._save({'alias': name}, '', until)} lacks the alias")
            return
        self._require_known(name)
        if len(self.aliases) == 1:
            raise ConfigError(
                f"{name} is the only model of this deployment",
                hint="`dynamo stop` ends the deployment; `dynamo add` adds another model first",
            )
        was_default = next(iter(self.aliases)) == name
        aliases = self.aliases.pop(name)
        self._on_change()
        await self._wait_until_unused(name)
        await self._forget(name, progress)
        progress(f"{name} is removed" + "".join(f", and its alias {alias}" for alias in aliases))
        if was_default:
            progress(f"the default model is {next(iter(self.aliases))} now")
        if save:
            until = f"{name} is removed until the deployment starts again"
            progress(f"{await self._save(None, name, until)} lacks the model")

    async def _save(self, entry: Mapping[str, Any] | None, name: str, until: str) -> str:
        """Change the settings file, one change at a time. An error tells `until` when it holds."""
        try:
            async with self._saving:
                return await self._require_sources().save(entry, name)
        except ConfigError as error:
            hint = f"{until}; {error.hint}" if error.hint else until
            raise ConfigError(error.message, hint=hint) from None

    async def add_adapter(
        self, name: str, path: str, model: str, progress: ControlProgressCallback, *, save: bool
    ) -> None:
        """Load a LoRA adapter of a model, and wait until the frontends serve it. Raises `NotFound`
        and `ConfigError`, and the error of a worker."""
        model = self._owner_of(model) or model
        self._require_known(model)
        self._require_free(name)
        if serves := await self.adapters.load(name, path, model):
            await self._wait_for_frontends(name, name, model)
        progress(f"{name} is {'served' if serves else 'loaded with it'}, an adapter of {model}")
        if save:
            until = f"{name} is served until the deployment ends"
            file = await self._save({"adapters": {name: path}}, model, until)
            progress(f"{file} has the adapter")

    async def _forget(self, model: str, progress: ControlProgressCallback) -> None:
        self.aliases.pop(model, None)
        self._loader.forget(model)
        self.adapters.forget(model)
        await self._group.remove_model(model, progress)
        self._on_change()

    async def _wait_until_unused(self, model: str) -> None:
        """Wait until no frontend has requests for a removed model, at most for the drain time."""
        prefix = removals_prefix(self._namespace, model)
        try:
            async with asyncio.timeout(NOTICE_S + self._drain_s):
                await self._clock.sleep(NOTICE_S)
                while await self._list_keys(prefix):
                    await self._clock.sleep(POLL_S)
        except (TimeoutError, DynamoError, OSError):
            return  # the workers end what is left

    async def _wait_for_frontends(self, name: str, model: str, parent: str = "") -> None:
        """Wait until all frontends of this supervisor serve `model` under a name. `parent`: the
        model of an adapter."""
        deadline = self._clock.now() + FRONTENDS_S
        while (
            self._clock.now() < deadline
            and (parent or model) in self.aliases
            and any(
                child.report.models.get(name) != model
                for child in self._group.children
                if child.spec.role == "frontend" and child.ready
            )
        ):
            await self._clock.sleep(POLL_S)

    async def set_alias(
        self, alias: str, model: str, progress: ControlProgressCallback, *, save: bool
    ) -> None:
        """Let `alias` mean `model` from now on. Raises `NotFound`, and `ConfigError` for the name
        of a model."""
        self._require_known(model)
        if alias in self.aliases:
            raise ConfigError(
                f"{alias!r} is the name of a model and cannot be an alias",
                hint=f"`dynamo remove {alias}` frees the name",
            )
        if parent := self.adapters.parent_of(alias):
            raise ConfigError(
                f"{alias!r} is an adapter of {parent} and cannot be an alias",
                hint=f"`dynamo remove {alias}` frees the name",
            )
        if not alias:
            raise ConfigError("an alias has no name", hint="write ALIAS=MODEL")
        for owner, aliases in self.aliases.items():
            self.aliases[owner] = tuple(name for name in aliases if name != alias)
        self.aliases[model] = (*self.aliases[model], alias)
        self._on_change()
        await self._wait_for_frontends(alias, model)
        progress(f"{alias} means {model} now")
        if save:
            until = f"{alias} means {model} until the deployment ends"
            progress(f"{await self._save({'alias': alias}, model, until)} has the alias")

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the models in order."""
        return [self._status(model) for model in self.aliases]

    def _status(self, model: str) -> ModelStatus:
        own = [child for child in self._group.children if child.spec.model == model]
        children = [child for child in own if not child.spec.standby]
        ready = sum(child.ready for child in children)
        desired = sum(child.desired for child in children)
        reasons = [child.crash_loop_reason or child.start_error for child in children]
        reason = next(filter(None, reasons), "")
        state = "loaded" if ready else "failed" if reason else "loading" if desired else "unloaded"
        if state == "loading" and any(child.sleeping for child in children):
            state = "sleeping"
        elif not ready and (load := self._loader.records.get(model)) is not None:
            state, reason = load.state, load.reason
        spec = children[0].spec if children else self._group.specs_of_model(model)[0]
        settings = spec.settings
        return ModelStatus(
            model,
            self.aliases[model],
            state,
            ready,
            desired,
            settings.engine.kind,
            settings.model.path or ", ".join(settings.engine.urls),
            reason,
            self.adapters.loaded(model),
        )

    def _owner_of(self, name: str) -> str | None:
        return next((m for m, names in self.aliases.items() if name == m or name in names), None)

    def _require_free(self, name: str) -> None:
        if (owner := self._owner_of(name)) is not None:
            what = "a model" if owner == name else f"an alias of {owner}"
        else:
            parent = self.adapters.parent_of(name)
            what = f"an adapter of {parent}" if parent else ""
        if what:
            raise ConfigError(
                f"{name!r} is {what} of this deployment already",
                hint="choose another --model-name; `dynamo models` lists the names",
                param="model.names",
            )

    def _require_known(self, model: str) -> None:
        if model not in self.aliases:
            hint = nearest_name_hint(model, list(self.aliases))
            raise NotFound(f"this deployment has no model {model!r}", hint=hint)

    def _require_sources(self) -> ModelSources:
        if self._sources is None:
            raise ConfigError("this deployment takes no models", hint="start it by `dynamo run`")
        return self._sources
