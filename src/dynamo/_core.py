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
    "HttpAsyncEngine": "services.compatibility.http.HttpAsyncEngine",
    "HttpError": "runtime.compatibility.errors.HttpError",
    "HttpService": "services.compatibility.http.HttpService",
    "ModelInput": "services.compatibility.models.ModelInput",
    "ModelRuntimeConfig": "services.compatibility.models.ModelRuntimeConfig",
    "ModelType": "services.compatibility.models.ModelType",
    "Namespace": "runtime.compatibility.objects.CompatNamespace",
    "PythonAsyncEngine": "services.compatibility.http.HttpAsyncEngine",
    "RouterMode": "services.compatibility.models.RouterMode",
    "WorkerType": "services.compatibility.models.WorkerType",
    "fetch_llm": "services.compatibility.models.fetch_model",
    "fetch_model": "services.compatibility.models.fetch_model",
    "register_llm": "services.compatibility.models.register_model",
    "register_model": "services.compatibility.models.register_model",
    "unregister_llm": "services.compatibility.models.unregister_model",
    "unregister_model": "services.compatibility.models.unregister_model",
}
SUBMODULES = ("exceptions",)


def load_name(owner: str, name: str) -> Any:
    """Return what stands for a name of NVIDIA Dynamo's module `owner`. Raises `ImportError`."""
    home = _HOMES.get(name)
    if home is not None:
        module, _, attribute = home.rpartition(".")
        return getattr(import_module(f"dynamo.{module}"), attribute)
    if name.startswith("__") or name in SUBMODULES:  # Python then looks for a module
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    raise ImportError(
        f"{owner}.{name} of NVIDIA Dynamo does not exist here: use what the table of the page "
        "how-to/migrate names instead"
    )


if not TYPE_CHECKING:  # unknown names stay errors to the type checker

    def __getattr__(name: str) -> Any:
        value = globals()[name] = load_name(__name__, name)
        return value
