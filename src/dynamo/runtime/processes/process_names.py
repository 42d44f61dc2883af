"""Names of processes: those of replicas are a kind and a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, NotFound
from dynamo.models.downloads.wheel_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from dynamo.runtime.processes.child import ChildProcess
    from dynamo.runtime.processes.child_spec import ChildSpec

DEFAULT_KIND = "worker"
"""The processes that a restart without a name replaces, and the role of all workers."""

MAX_REPLICAS = 1024
"""A larger number on one host is taken for a typing error."""
STANDBY_SUFFIX = "-standby"
"""The end of the name of standby processes, after the kind whose places they take."""


def kind_of_process(name: str) -> str:
    """The common name of replicas: `worker` for `worker-2`."""
    head, _, tail = name.rpartition("-")
    return head if head and tail.isdecimal() else name


def kind_of_spec(spec: ChildSpec) -> str:
    """The kind of a process, which is that of the others for a standby process."""
    kind = kind_of_process(spec.name)
    return kind.removesuffix(STANDBY_SUFFIX) if spec.standby else kind


def is_called(child: ChildProcess, name: str) -> bool:
    """Whether `name` is the name or the instance id of a process."""
    return bool(name) and name in {child.spec.name, child.instance}


def check_replicas(kind: str, count: int) -> None:
    """Check a number of replicas. Raises `ConfigError`."""
    if not 0 <= count <= MAX_REPLICAS:
        raise ConfigError(f"cannot run {count} {kind} processes: a host runs 0 to {MAX_REPLICAS}")


def kind_called(name: str, kinds: Mapping[str, ChildSpec]) -> str:
    """Return the kind of this name, or the only kind of this role, in upper or lower case, or the
    only kind of the workers of this model. Raises `NotFound` for one of several."""
    if name in kinds:
        return name
    called = [
        kind
        for kind, spec in kinds.items()
        if name and (name.lower() in (spec.role, kind.lower()) or name == spec.model)
    ]
    if len(called) > 1:
        hint = f"the kinds are: {', '.join(sorted(called))}"
        raise NotFound(f"no kind of process is called {name!r}", hint=hint)
    return called[0] if called else name


def url_worker_kind(kinds: Mapping[str, ChildSpec]) -> str:
    """Return the kind of workers to which a server is added. Raises `ConfigError` if there are none
    or those of several models."""
    workers = [kind for kind, spec in kinds.items() if spec.role == DEFAULT_KIND]
    if DEFAULT_KIND in workers:
        return DEFAULT_KIND
    if len(workers) != 1:
        raise ConfigError(
            f"the deployment has {'workers of several kinds' if workers else 'no workers'}",
            hint="add the server as a model of its own: out=openai and --model-name NAME",
        )
    return workers[0]


def url_worker_spec(spec: ChildSpec, url: str, model: str, kv_events: str) -> ChildSpec:
    """Return the spec of a worker for a server, of the kind of `spec`."""
    engine = replace(
        spec.settings.engine,
        kind="openai",
        urls=(url,),
        url_model=model,
        url_kv_events=(kv_events,) if kv_events else (),
    )
    model_settings = spec.settings.model
    if not (model_settings.path or spec.settings.engine.kind == "openai"):
        model_settings = replace(model_settings, path=DEFAULT_MODEL.name)
    return replace(spec, settings=replace(spec.settings, engine=engine, model=model_settings))


def replica_spec(spec: ChildSpec, name: str, specs: Mapping[str, ChildSpec]) -> ChildSpec:
    """Return the spec of a replica with its own share of the devices, as `specs` have it by name.
    Raises `ConfigError` if none is left for it."""
    engine = spec.settings.engine
    if not (engine.device_ids or spec.cards) or engine.urls:
        return replace(spec, name=name)
    own = specs.get(name)
    if own is None or (spec.cards and not own.cards):
        raise ConfigError(
            f"no device is left for {name}",
            hint="give device_ids more numbers and the start more workers",
            param="engine.device_ids",
        )
    device_ids = own.settings.engine.device_ids
    settings = replace(spec.settings, engine=replace(engine, device_ids=device_ids))
    return replace(spec, name=name, settings=settings, cards=own.cards)
