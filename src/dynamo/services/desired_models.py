"""The models that supervisors are to serve, as frontends and routers learn them from discovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from dynamo.runtime.supervisors import LoadRecord, LoadState, SupervisorRecord, SupervisorView

State = Literal["loaded", "loading", "sleeping", "unloaded", "failed"]
STATES: tuple[State, ...] = ("loaded", "loading", "sleeping", "unloaded", "failed")
LOAD_ORDER: tuple[LoadState, ...] = ("loaded", "loading", "leaving", "unloaded", "failed")
STARTING_TEXT = "its supervisor starts a worker"
NO_WORKERS_TEXT = "its supervisor keeps no worker of it running"


class ModelState(NamedTuple):
    """The state of a model, and why it is not loaded."""

    state: State
    reason: str = ""


class DesiredModels:
    """The aliases of each model that is to be served in a namespace, by the model's id: first those
    of the supervisor `own`, in the order of its settings.

    A model is removed when its supervisor lists it no more and no other one does. It stays when its
    supervisor is gone, since that may come back. `loads` has the models that are on demand.
    """

    def __init__(self, view: SupervisorView, namespace: str, own: str = "") -> None:
        self._view = view
        self._namespace = namespace
        self._own = own
        self._listed: dict[str, frozenset[str]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._states: dict[str, ModelState] = {}
        self.loads: dict[str, LoadRecord] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.adapters: dict[str, str] = {}
        """The model of each LoRA adapter by name."""
        self.removed: set[str] = set()
        view.on_change(self._on_records_changed)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a model may have been added or removed, or has another state."""
        self._listeners.append(listener)

    def forget(self, model: str) -> None:
        """Forget that a model was removed: no worker announces it any more."""
        self.removed.discard(model)

    def state(self, model: str) -> ModelState:
        """Return the state of a model without a worker that answers."""
        return self._states.get(model, ModelState("unloaded", NO_WORKERS_TEXT))

    def _read_loads(self) -> dict[str, LoadRecord]:
        """Return the models on demand. Of several supervisors, the first counts that serves one."""
        loads: dict[str, LoadRecord] = {}
        for record in self._records().values():
            for model, load in record.on_demand.items():
                other = loads.get(model, load)
                loads[model] = min(other, load, key=lambda load: LOAD_ORDER.index(load.state))
        return loads

    def _read_states(self) -> dict[str, ModelState]:
        states: dict[str, ModelState] = {}
        for record in self._records().values():
            for kind, described in record.kinds.items():
                if record.desired.get(kind):
                    states[described.model] = ModelState("loading", STARTING_TEXT)
                elif reason := record.failing.get(kind):
                    states.setdefault(described.model, ModelState("failed", reason))
        for model, load in self.loads.items():
            states[model] = ModelState(
                "loaded" if load.state == "leaving" else load.state, load.reason
            )
        return states

    def _records(self) -> dict[str, SupervisorRecord]:
        records = sorted(
            self._view.records.items(), key=lambda item: (item[0] != self._own, item[0])
        )
        return {
            supervisor: record
            for supervisor, record in records
            if record.namespace == self._namespace
        }

    def _on_records_changed(self) -> None:
        desired: dict[str, tuple[str, ...]] = {}
        dropped: set[str] = set()
        for supervisor, record in self._records().items():
            for model, aliases in record.models.items():
                desired.setdefault(model, aliases)
            dropped |= self._listed.get(supervisor, frozenset()) - record.models.keys()
            self._listed[supervisor] = frozenset(record.models)
        dropped -= desired.keys()
        self.removed = (self.removed | dropped) - desired.keys()
        orphans = {
            model: aliases
            for model, aliases in self.aliases.items()
            if model not in desired and model not in dropped
        }
        self.aliases = desired | orphans
        self.loads = self._read_loads()
        orphans_adapters = {name: m for name, m in self.adapters.items() if m in orphans}
        self.adapters = orphans_adapters | {
            name: model
            for record in self._records().values()
            for model, adapters in record.adapters.items()
            for name, path in adapters.items()
            if path and model in desired
        }
        self._states = self._read_states()
        for listener in self._listeners:
            listener()
