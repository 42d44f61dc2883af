"""The names that programs import from NVIDIA Dynamo's native module, loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.runtime import distributed
    from dynamo.runtime.compatibility import calls, objects

    CancellationToken = objects.CompatToken
    Client = calls.CompatClient
    Component = objects.CompatComponent
    Context = calls.CompatContext
    DistributedRuntime = distributed.DistributedRuntime
    Endpoint = objects.CompatEndpoint
    Namespace = objects.CompatNamespace

_HOMES = {
    "CancellationToken": "runtime.compatibility.objects.CompatToken",
    "Client": "runtime.compatibility.calls.CompatClient",
    "Component": "runtime.compatibility.objects.CompatComponent",
    "Context": "runtime.compatibility.calls.CompatContext",
    "DistributedRuntime": "runtime.distributed.DistributedRuntime",
    "Endpoint": "runtime.compatibility.objects.CompatEndpoint",
    "Namespace": "runtime.compatibility.objects.CompatNamespace",
}


def load_name(owner: str, name: str) -> Any:
    """Return what stands for a name of NVIDIA Dynamo's module `owner`. Raises `ImportError`."""
    home = _HOMES.get(name)
    if home is not None:
        module, _, attribute = home.rpartition(".")
        return getattr(import_module(f"dynamo.{module}"), attribute)
    if name.startswith("__"):
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    raise ImportError(
        f"{owner}.{name} of NVIDIA Dynamo does not exist here: docs/how-to/migrate.md lists what "
        "does, and what to use instead"
    )


if not TYPE_CHECKING:  # unknown names stay errors to the type checker

    def __getattr__(name: str) -> Any:
        value = globals()[name] = load_name(__name__, name)
        return value
