"""The processor of a LoRA adapter, which is that of its model with other options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from dynamo.core.hashing import adapter_salt

T = TypeVar("T")


class AdapterProcessor:
    """Names an adapter by its id in all requests, and gives their blocks a salt of its own. `base`
    has the methods of `ChatProcessor`."""

    def __init__(self, base: Any, adapter: str) -> None:
        self.tokenize, self.detokenize = base.tokenize, base.detokenize
        self.token_strings, self.token_bytes = base.token_strings, base.token_bytes
        self.adapter = adapter

        self.chat = self._wrap(base.chat)
        self.complete = self._wrap(base.complete)
        self.prepare_completion = self._wrap(base.prepare_completion)

    def _wrap(self, method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        """Return a method of the model that answers with the adapter."""
        return lambda request, *rest: method(self._with_adapter(request), *rest)

    def _with_adapter(self, request: Any) -> Any:
        salt = adapter_salt(self.adapter, request.options.salt)
        return replace(request, options=replace(request.options, adapter=self.adapter, salt=salt))
