"""The processor of a LoRA adapter, which is that of its model with other options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.hashing import adapter_salt
from dynamo.core.text import ChatRequest, CompletionRequest, TextReply


class AdapterProcessor:
    """Names an adapter by its id in all requests, and gives their blocks a salt of its own. `base`
    has the methods of `ChatProcessor`."""

    def __init__(self, base: Any, adapter: str) -> None:
        self.tokenize, self.detokenize = base.tokenize, base.detokenize
        self.token_strings, self.token_bytes = base.token_strings, base.token_bytes
        self._base = base
        self.adapter = adapter

    def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> Awaitable[None]:
        """Answer as the model does, with the adapter."""
        chat: Awaitable[None] = self._base.chat(self._with_adapter(request), context, reply)
        return chat

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Answer as the model does, with the adapter."""
        await self._base.complete(self._with_adapter(request), context, reply)

    async def prepare_completion(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> Callable[[], Awaitable[None]]:
        """Prepare as the model does, with the adapter."""
        send: Callable[[], Awaitable[None]] = await self._base.prepare_completion(
            self._with_adapter(request), context, reply
        )
        return send

    def _with_adapter(self, request: Any) -> Any:
        salt = adapter_salt(self.adapter, request.options.salt)
        return replace(request, options=replace(request.options, adapter=self.adapter, salt=salt))
