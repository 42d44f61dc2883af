"""Which models are served, and by whom."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.core.context import Context
from dynamo.core.errors import ModelNotFound, ModelNotReady
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply

DEFAULT_MODEL = "default"
RETRY_AFTER_S = 2.0
MAX_NAMES_SHOWN = 20


class TextProcessor(Protocol):
    """What answers in text: `scheduling.processor`, or a fake of it."""

    def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> Awaitable[None]:
        """Answer a conversation."""

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Continue a prompt."""

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], *, add_special: bool = True
    ) -> list[int]:
        """Token ids of a text, or of messages as the model's template renders them."""

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    async def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token id by itself."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model that can be asked for: under `names`, the first of which is its id. `derived`: it
    is made of others, so that `default` means one of those where there is any."""

    names: tuple[str, ...]
    processor: Any
    created: int
    context_tokens: int
    owned_by: str = "dynamo"
    derived: bool = False


class Gateway:
    """Models by name. `default` is always answered, by the first model that is not derived."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._pending: dict[str, str] = {}
        self._no_models_reason = "no model has been announced yet"

    def set_pending(self, name: str, reason: str) -> None:
        """`name` will be served; `reason` says what it waits for."""
        self._pending[name] = reason

    def set_no_models_reason(self, reason: str) -> None:
        """Why there is no model at all."""
        self._no_models_reason = reason

    def add(self, served: ServedModel) -> None:
        """Serve a model; a name that is there is replaced. Derived ones stand behind the others."""
        for name in served.names:
            self._pending.pop(name, None)
            self._models[name] = served
        self._models = dict(sorted(self._models.items(), key=lambda one: one[1].derived))

    def remove(self, name: str) -> None:
        """Serve it no longer, under any of its names."""
        self._pending.pop(name, None)
        served = self._models.get(name)
        if served is not None:
            self._models = {
                key: value for key, value in self._models.items() if value is not served
            }

    @property
    def models(self) -> dict[str, ServedModel]:
        """Every served name, in order of arrival."""
        return self._models

    @property
    def not_ready_reason(self) -> str:
        """Why nothing is served; "" when something is."""
        if self._models:
            return ""
        if self._pending:
            return "; ".join(f"{name}: {reason}" for name, reason in self._pending.items())
        return self._no_models_reason

    def require_ready(self) -> None:
        """Raises `NotReady` while there is no model."""
        if not self._models:
            raise ModelNotReady(
                f"no model is ready: {self.not_ready_reason}",
                hint="try again in a moment; /health says more",
                retry_after_s=RETRY_AFTER_S,
            )

    def find(self, name: str) -> tuple[str, ServedModel]:
        """The name to show, and the model. Raises `ModelNotFound` or `NotReady`."""
        served = self._models.get(name)
        if served is not None:
            return name, served
        if name in self._pending:
            raise ModelNotReady(
                f"model {name!r} is not ready: {self._pending[name]}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.require_ready()
        if name == DEFAULT_MODEL:
            served = next(iter(self._models.values()))
            return served.names[0], served
        raise ModelNotFound(
            f"there is no model {name[:200]!r}; there is {_format_names(self._models)}",
            param="model",
        )


def _format_names(names: Mapping[str, ServedModel]) -> str:
    shown = [repr(name) for name in list(names)[:MAX_NAMES_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


MODELS_HEALTH_KEY = "models"
"""The health reason of a frontend that has none yet."""


def find_worker_model(gateway: Gateway, name: str | None) -> tuple[str, ServedModel]:
    """A model that workers serve: the one of that name; the first one where there is no name, or
    the name is that of a service (whose request was passed on as it was). Raises `ModelNotFound`,
    `NotReady`."""
    shown, served = gateway.find(name or DEFAULT_MODEL)
    if served.derived:
        shown, served = gateway.find(DEFAULT_MODEL)
    if served.derived:
        raise ModelNotReady("no model is ready yet that is not made of others", retry_after_s=1.0)
    return shown, served
