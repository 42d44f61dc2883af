"""The names that programs import from NVIDIA Dynamo's `dynamo.llm`, loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo._core import load_name

if TYPE_CHECKING:
    from dynamo.runtime.compatibility import errors
    from dynamo.services.compatibility import http, models

    HttpAsyncEngine = PythonAsyncEngine = http.HttpAsyncEngine
    HttpError = errors.HttpError
    HttpService = http.HttpService
    ModelInput = models.ModelInput
    ModelRuntimeConfig = models.ModelRuntimeConfig
    ModelType = models.ModelType
    RouterMode = models.RouterMode
    WorkerType = models.WorkerType
    fetch_llm = fetch_model = models.fetch_model
    register_llm = register_model = models.register_model
    unregister_llm = unregister_model = models.unregister_model
else:  # unknown names stay errors to the type checker

    def __getattr__(name: str) -> Any:
        value = globals()[name] = load_name(__name__, name)
        return value
