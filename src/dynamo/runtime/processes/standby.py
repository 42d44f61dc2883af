"""Standby processes: each has loaded its model, and takes the place of a process that dies."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.process_names import STANDBY_SUFFIX, kind_of_process, kind_of_spec

log = logging.getLogger(__name__)


def with_standbys(specs: Sequence[ChildSpec]) -> list[ChildSpec]:
    """Return the processes with the standby processes of each kind of worker. Raises `ConfigError`
    for workers of URLs, which load nothing."""
    standbys: list[ChildSpec] = []
    kinds = {kind_of_process(spec.name): spec for spec in specs if spec.role == "worker"}
    for kind, spec in kinds.items():
        engine = spec.settings.engine
        if engine.standby and engine.urls:
            raise ConfigError(
                "workers of URLs load no model, and need no standby processes",
                hint="leave out --standby",
                param="engine.standby",
            )
        names = (f"{kind}{STANDBY_SUFFIX}-{number}" for number in range(1, engine.standby + 1))
        standbys += [replace(spec, name=name, standby=True) for name in names]
    return [*specs, *standbys]


def take_over(dead: ChildProcess, children: Sequence[ChildProcess]) -> None:
    """Let a standby process serve in the place of a process that died while it served, if one has
    loaded the same model with the same settings."""
    if dead.spec.standby or dead.report.state not in {"ready", "draining"}:
        return  # another process would die at the start, too
    wanted = _comparable(dead.spec.settings)
    for child in children:
        stands_by = child.spec.standby and child.pid and child.report.state == "standby"
        if stands_by and _comparable(child.spec.settings) == wanted:
            fields = {"name": dead.spec.name, "standby": child.spec.name, "pid": child.pid}
            log.info("a standby process takes the place of a dead one", extra={"fields": fields})
            child.exchange_places(dead)
            return


def serving_instead(
    old: ChildProcess, new: ChildProcess, children: Sequence[ChildProcess]
) -> ChildProcess:
    """Return the process that `new` replaces: the standby process, if `old` died meanwhile."""
    name = new.spec.name
    return next((child for child in children if child is not new and child.spec.name == name), old)


def restart_standbys(
    children: Sequence[ChildProcess],
    specs: Mapping[str, ChildSpec],
    replaced: Sequence[ChildProcess] = (),
) -> None:
    """Let standby processes end whose settings have changed, so that they start with the new ones,
    and those of the kinds of `replaced` processes: the model's files may have changed. `specs` are
    those of the new settings, by name."""
    kinds = {kind_of_spec(child.spec) for child in replaced}
    for child in children:
        spec = specs.get(child.spec.name, child.spec)
        changed = child.spec.settings != spec.settings or kind_of_spec(child.spec) in kinds
        if child.spec.standby and changed:
            child.spec = replace(child.spec, settings=spec.settings)
            child.send_signal(signal.SIGTERM)


def _comparable(settings: Settings) -> Settings:
    """Return settings without the devices, which each process keeps."""
    return replace(settings, engine=replace(settings.engine, device_ids=()))
