"""The models that can be requested, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from dynamo.core.errors import InvalidRequest, ModelNotFound, ModelNotReady, nearest_name_hint
from dynamo.core.values import SamplingParams

DEFAULT_MODEL = "default"
RETRY_AFTER_S = 2.0
MAX_NAMES_SHOWN = 20
NO_ADAPTERS: Mapping[str, str] = {}


class ServedModel(msgspec.Struct, frozen=True):
    """A model that is served under `names`; the first one is its id.

    `processor` has the methods of `scheduling.processor.ChatProcessor`, which answer in text.
    `derived` models are built on other models. The name `default` prefers models that are not.
    `context_tokens` is 0 where the length is unknown; `created` is Unix time. `tool_format` is
    the family whose tool calls are read from answers, and why; empty where that is unknown.
    `sampling` holds the values of requests without their own. `bos_token` and `eos_token` are ""
    where a model has none or they are unknown. `parent`: the model of a LoRA adapter, whose folder
    is `root`.
    """

    names: tuple[str, ...]
    processor: Any
    created: int
    context_tokens: int
    owned_by: str = "dynamo"
    derived: bool = False
    tool_format: str = ""
    sampling: SamplingParams = SamplingParams()
    bos_token: str = ""
    eos_token: str = ""
    parent: str = ""
    root: str = ""


class ServedEmbeddingModel(msgspec.Struct, frozen=True):
    """An embedding model that is served under `names`; the first one is its id.

    `processor` is a `services.embedding_models.EmbeddingProcessor`. A vector has `dimensions`
    elements, and a text at most `context_tokens` tokens.
    """

    names: tuple[str, ...]
    processor: Any
    created: int
    context_tokens: int
    dimensions: int
    owned_by: str = "dynamo"


class UnloadedModel(ModelNotReady):
    """A request is for a model that is on demand and not open here. `Gateway.load` opens it."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model {model!r} is not loaded", retry_after_s=RETRY_AFTER_S)
        self.model = model


LoadModel = Callable[[str, float | None], AbstractAsyncContextManager[None]]
"""(model, timeout_s): has a model on demand open during the block. Raises `DynamoError`."""


M = TypeVar("M", bound=ServedModel | ServedEmbeddingModel)


class Gateway:
    """Served models by name. The first model that is not derived is found by the name `default`,
    by "" and by None, as in requests without a model.

    `models` are in the order of `set_desired`, then of arrival, derived ones last.
    `context_tokens` is their longest context; 0 without models. `describe()` returns fields of
    `/v1/models` by model, such as its state. `load` opens models that are on demand.
    """

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}
        self.embedding_models: dict[str, ServedEmbeddingModel] = {}
        self._added: dict[str, ServedModel] = {}
        self._added_embedding_models: dict[str, ServedEmbeddingModel] = {}
        self._adapters: dict[str, Mapping[str, ServedModel]] = {}
        self._desired: Mapping[str, Sequence[str]] = {}
        self._desired_adapters: Mapping[str, str] = {}
        self._pending: dict[str, str] = {}
        self._unloaded: Mapping[str, bool] = {}
        self.load: LoadModel | None = None
        self._no_models_reason = "no model has been announced yet"
        self.context_tokens = 0
        self._listeners: list[Callable[[], None]] = []
        self.describe: Callable[[], Mapping[str, Mapping[str, Any]]] = dict

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a model was added or removed."""
        self._listeners.append(listener)

    def set_pending(self, name: str, reason: str) -> None:
        """Announce that `name` will be served; `reason` tells clients why it is not served yet."""
        self._pending[name] = reason

    def set_no_models_reason(self, reason: str) -> None:
        """Set the reason that clients read while there is no model at all."""
        self._no_models_reason = reason

    def add(self, served: ServedModel) -> None:
        """Serve a model under its names, instead of earlier models of these names."""
        self._added.pop(served.names[0], None)
        self._added[served.names[0]] = served
        self._update()

    def set_adapters(self, parent: str, adapters: Mapping[str, ServedModel]) -> None:
        """Serve these LoRA adapters of a model, and no others. Models keep their names."""
        self._adapters[parent] = adapters
        self._update()

    def add_embedding_model(self, served: ServedEmbeddingModel) -> None:
        """Serve an embedding model under its names, instead of an earlier one of its id."""
        self._added_embedding_models[served.names[0]] = served
        self._update()

    def set_desired(
        self, desired: Mapping[str, Sequence[str]], adapters: Mapping[str, str] = NO_ADAPTERS
    ) -> None:
        """Set the models that are to be served, in this order, each with its aliases. The aliases
        replace those that the model was announced with. `adapters`: the model of each adapter that
        is to be served."""
        self._desired, self._desired_adapters = desired, adapters
        self._update()

    def set_unloaded(self, models: Mapping[str, bool]) -> None:
        """Set the models that are on demand and not open, and whether each computes vectors."""
        if models != self._unloaded:
            self._unloaded = models
            self._update()

    def unloaded_names(self) -> Mapping[str, str]:
        """Return all names of models that are on demand and not open, with their ids."""
        return {
            name: model
            for model in self._unloaded
            for name in (model, *self._desired.get(model, ()))
            if name not in self.models and name not in self.embedding_models
        }

    def closed_names(self) -> Mapping[str, tuple[str, str]]:
        """Return all names that are to be served and are not open, each with the model's id, and
        for an adapter with its model, else ""."""
        names = {
            name: (model, "")
            for model, aliases in self._desired.items()
            for name in (model, *aliases)
        }
        names |= {name: (name, parent) for name, parent in self._desired_adapters.items()}
        opened = self.models.keys() | self.embedding_models.keys()
        return {name: names[name] for name in names if name not in opened}

    def remove(self, model: str) -> None:
        """Forget a model of this id and its adapters. Requests that have found it continue."""
        self._added.pop(model, None)
        self._added_embedding_models.pop(model, None)
        self._adapters.pop(model, None)
        self._pending.pop(model, None)
        self._update()

    def _update(self) -> None:
        """Compute the names under which the models are found."""
        names = self._names_of(self._added)
        for adapters in self._adapters.values():
            for name, adapter in adapters.items():
                names.setdefault(name, adapter)
        order = {model: index for index, model in enumerate(self._desired)}

        def rank(item: tuple[str, ServedModel]) -> tuple[bool, bool, int]:
            # Models of workers come before their adapters, and both before derived models.
            _, served = item
            return served.derived, bool(served.parent), order.get(served.names[0], len(order))

        self.models = dict(sorted(names.items(), key=rank))
        self.embedding_models = self._names_of(self._added_embedding_models)
        for name in (*self.models, *self.embedding_models):
            self._pending.pop(name, None)
        self.context_tokens = max(
            (model.context_tokens for model in self.models.values()), default=0
        )
        for listener in self._listeners:
            listener()

    def _names_of(self, added: Mapping[str, M]) -> dict[str, M]:
        """Return models by all of their names. The id of a model is no other one's alias."""
        models: dict[str, M] = {}
        for name, served in added.items():
            models |= dict.fromkeys((name, *self._desired.get(name, served.names)), served)
        return {**models, **added}

    @property
    def not_ready_reason(self) -> str:
        """Why no model is served; empty when one is."""
        if self.models or self.embedding_models or self._unloaded:
            return ""
        if self._pending:
            return "; ".join(f"{name}: {reason}" for name, reason in self._pending.items())
        return self._no_models_reason

    def require_ready(self) -> None:
        """Raise `ModelNotReady` while there is no model."""
        if not (self.models or self.embedding_models or self._unloaded):
            raise ModelNotReady(
                f"no model is ready: {self.not_ready_reason}",
                hint="try again in a moment; /health has details",
                retry_after_s=RETRY_AFTER_S,
            )

    def find(self, name: str | None) -> tuple[str, ServedModel]:
        """Return the name to show, and the model. Raises `ModelNotFound`, `ModelNotReady`."""
        name = name or DEFAULT_MODEL
        served = self.models.get(name)
        if served is not None:
            return name, served
        pending = self._pending_model(name)
        is_unloaded = pending in self._unloaded and pending not in self.models
        if is_unloaded and not self._unloaded[pending]:
            raise UnloadedModel(pending)
        if pending in self._pending and pending not in self._unloaded:
            raise ModelNotReady(
                f"model {name!r} is not ready: {self._pending[pending]}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.require_ready()
        embeds = name in self.embedding_models or is_unloaded
        names = {**self.models, **self.unloaded_names()}
        if embeds or not (self.models or False in self._unloaded.values()):
            embedding = self.embedding_models or self._unloaded
            raise InvalidRequest(
                f"{name!r} computes embeddings and no text"
                if embeds
                else f"only embedding models are served here: {_format_names(embedding)}",
                hint="use /v1/embeddings, or serve a model that generates text",
                param="model",
            )
        if name == DEFAULT_MODEL:
            served = next(iter(self.models.values()))
            return served.names[0], served
        raise ModelNotFound(
            f"there is no model {name[:200]!r}; served: {_format_names(names)}",
            hint=self._nearest_hint(name, "GET /v1/models lists them"),
            param="model",
        )

    def _nearest_hint(self, name: str, otherwise: str) -> str:
        """Return a hint with the nearest name of all that are served or to be served."""
        desired = [name for model, aliases in self._desired.items() for name in (model, *aliases)]
        known = (*self.models, *self.embedding_models, *desired, *self._desired_adapters)
        return nearest_name_hint(name[:200], dict.fromkeys(known), otherwise)

    def _pending_model(self, name: str) -> str:
        """Return the id of the desired model that a name means while it is not served."""
        if name == DEFAULT_MODEL:
            embeds = self.embedding_models.keys() | {m for m, own in self._unloaded.items() if own}
            return next((model for model in self._desired if model not in embeds), name)
        return self._desired_model(name) or self._desired_adapters.get(name, name)

    def _desired_model(self, name: str) -> str:
        """Return the id of the desired model that has a name, "" if none has."""
        desired = self._desired.items()
        return next((model for model, names in desired if name == model or name in names), "")

    def is_model_name(self, name: str) -> bool:
        """Whether a name means a model that is served or to be served, and no adapter."""
        served = self.models.get(name)
        if name == DEFAULT_MODEL or name in self.embedding_models or (served and not served.parent):
            return True
        return bool(self._desired_model(name))

    def find_embedding_model(self, name: str | None) -> tuple[str, ServedEmbeddingModel]:
        """Return the name to show, and the model. Raises `ModelNotFound`, `ModelNotReady`, and
        `InvalidRequest` for a model that generates text."""
        name = name or DEFAULT_MODEL
        served = self.embedding_models.get(name)
        if served is not None:
            return name, served
        unloaded = self.unloaded_names().get(name, "")
        if name == DEFAULT_MODEL and not self.embedding_models:
            unloaded = next((model for model, embeds in self._unloaded.items() if embeds), "")
        if self._unloaded.get(unloaded):
            raise UnloadedModel(unloaded)
        pending = self._desired_model(name) or name
        if pending in self._pending and not unloaded:
            raise ModelNotReady(
                f"model {name!r} is not ready: {self._pending[pending]}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.require_ready()
        if self.embedding_models and name == DEFAULT_MODEL:
            served = next(iter(self.embedding_models.values()))
            return served.names[0], served
        hint = "start one: `dynamo run in=http out=native minilm`"
        to_load = [model for model, embeds in self._unloaded.items() if embeds]
        if embedding_models := {**self.embedding_models, **dict.fromkeys(to_load)}:
            hint = f"embedding models: {_format_names(embedding_models)}"
        if name in self.models or unloaded or name == DEFAULT_MODEL:
            raise InvalidRequest(
                f"{name[:200]!r} generates text and computes no embeddings",
                hint=hint,
                param="model",
            )
        raise ModelNotFound(
            f"there is no embedding model {name[:200]!r}",
            hint=self._nearest_hint(name, hint),
            param="model",
        )


def _format_names(names: Mapping[str, Any]) -> str:
    shown = [repr(name) for name in list(names)[:MAX_NAMES_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


MODELS_HEALTH_KEY = "models"
"""The key of the health reason of a frontend without models."""


def find_worker_model(gateway: Gateway, name: str | None) -> tuple[str, ServedModel]:
    """Return a model that workers serve, for a request that a service passes on.

    Without a name, or with the name of a derived model, the default model is returned. Raises
    `ModelNotFound`, `ModelNotReady`.
    """
    shown, served = gateway.find(name)
    if served.derived:
        shown, served = gateway.find(DEFAULT_MODEL)
    if served.derived:
        raise ModelNotReady("no model that workers serve is ready yet", retry_after_s=1.0)
    return shown, served
