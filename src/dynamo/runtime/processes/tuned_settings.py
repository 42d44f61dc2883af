"""Settings that trials have changed while a deployment serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from dynamo.core.settings import Settings
from dynamo.core.settings.reload import replace_setting
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.process_names import kind_of_spec

Values = Mapping[str, Any]
"""Values of settings by key."""


class TunedSettings:
    """The settings that trials have changed, by kind of process, until somebody writes
    other ones into the settings file."""

    def __init__(self) -> None:
        self._changes: dict[str, dict[str, tuple[Any, Any]]] = defaultdict(dict)

    def change(self, kind: str, before: Values, after: Values) -> None:
        """Use other values from now on. The values before the first change are remembered."""
        changes = self._changes[kind]
        for key, value in after.items():
            written = changes.pop(key, (before[key],))[0]
            if value != written:
                changes[key] = written, value

    def apply(self, specs: Sequence[ChildSpec]) -> Sequence[ChildSpec]:
        """Return specs that were read from the settings, with the changes."""
        return [self._apply(spec, self._changes.get(kind_of_spec(spec), {})) for spec in specs]

    def _apply(self, spec: ChildSpec, changes: Mapping[str, tuple[Any, Any]]) -> ChildSpec:
        present = values_of(spec.settings, changes)
        later = {key: value for key, (old, value) in changes.items() if present[key] == old}
        return with_values(spec, later) if later else spec


def values_of(settings: Settings, keys: Mapping[str, object]) -> Values:
    """Return the values of settings with these keys."""
    return {key: attrgetter(key)(settings) for key in keys}


def with_values(spec: ChildSpec, values: Values) -> ChildSpec:
    """Return a spec with other values."""
    settings = spec.settings
    for key, value in values.items():
        settings = replace_setting(settings, key, value)
    return replace(spec, settings=settings)
