"""The names that programs import from NVIDIA Dynamo's native module, loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES_BY_MODULE = {
    "core.errors": {
        "CannotConnect": "WorkerFailed",
        "ConnectionTimeout": "WorkerFailed",
        "Disconnected": "WorkerFailed",
        "DynamoException": "DynamoError",
        "EngineShutdown": "WorkerDraining",
        "InvalidArgument": "InvalidRequest",
        "RouterQueueLimitExceeded": "Overloaded",
        "StreamIncomplete": "WorkerFailed",
        "Unknown": "InternalError",
        "WorkerShutdown": "WorkerDraining",
        "WorkerUnavailable": "WorkerFailed",
    },
    "runtime.distributed": {"DistributedRuntime": "DistributedRuntime"},
    "runtime.compatibility.calls": {"Client": "CompatClient", "Context": "CompatContext"},
    "runtime.compatibility.errors": {"HttpError": "HttpError"},
    "runtime.compatibility.objects": {
        "CancellationToken": "CompatToken",
        "Component": "CompatComponent",
        "Endpoint": "CompatEndpoint",
        "Namespace": "CompatNamespace",
    },
    "services.compatibility.http": {
        "HttpAsyncEngine": "HttpAsyncEngine",
        "HttpService": "HttpService",
        "PythonAsyncEngine": "HttpAsyncEngine",
    },
    "services.compatibility.models": {
        **{
            name: name
            for name in (
                *("KvEventPublisher", "KvRouterConfig", "ModelInput", "ModelRuntimeConfig"),
                *("ModelType", "RouterConfig", "RouterMode", "WorkerMetricsPublisher"),
                *("WorkerType", "fetch_model", "register_model", "unregister_model"),
            )
        },
        "fetch_llm": "fetch_model",
        "register_llm": "register_model",
        "unregister_llm": "unregister_model",
    },
}
"""By module of this project: NVIDIA Dynamo's names, and those here."""
_HOMES = {
    name: (module, own_name)
    for module, names in _NAMES_BY_MODULE.items()
    for name, own_name in names.items()
}
SUBMODULES = ("exceptions",)


def load_name(owner: str, name: str) -> Any:
    """Return what stands for a name of NVIDIA Dynamo's module `owner`. Raises `ImportError`."""
    if name in _HOMES:
        module, attribute = _HOMES[name]
        return getattr(import_module(f"dynamo.{module}"), attribute)
    if name.startswith("__") or name in SUBMODULES:  # Python then looks for a module
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    raise ImportError(
        f"{owner}.{name} of NVIDIA Dynamo does not exist here: use what the table of the page "
        "how-to/migrate names instead"
    )


def __getattr__(name: str) -> Any:
    value = globals()[name] = load_name(__name__, name)
    return value
