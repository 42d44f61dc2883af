"""Prompts in tokens: template, then encoding; on the loop only what is sure to be short."""

from __future__ import annotations

from collections.abc import Awaitable
from math import inf

from dynamo.core.clock import Clock
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.text import ChatRequest
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.tokenization.encoders import FastEncoder
from dynamo.models.tokenization.segment_cache import SegmentCache
from dynamo.models.tokenization.tokenizer import Tokenizer

MAX_INLINE_CHARS = 2_000
MAX_FAST_INLINE_CHARS = 6_000
"""Uncached text that is encoded on the loop, by the slow and the fast encoder: at most 1 ms."""
MAX_INLINE_RENDER_CHARS = 400_000
MAX_INLINE_RENDER_MESSAGES = 100
"""A conversation that is rendered on the loop: at most this long, in at most so many messages."""
RESERVED_TEMPLATE_ARGS = {"self", "messages", "tools", "add_generation_prompt"}

EncodedPrompt = bytes | Awaitable[bytes]
"""Packed; at once where that is sure to be short."""


class PromptEncoder:
    """Turns conversations and texts into packed ids, by way of a cache of segments."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, clock: Clock) -> None:
        self._template = template
        self._clock = clock
        self._segment_cache = SegmentCache(tokenizer)
        fast = tokenizer.encoder_name == FastEncoder.name
        self._inline_chars = MAX_FAST_INLINE_CHARS if fast else MAX_INLINE_CHARS
        self._prefix_ids, self._suffix_ids = tokenizer.prompt_affixes

    def encode_chat(self, request: ChatRequest, most_chars: float = inf) -> EncodedPrompt:
        """The conversation by the model's template. Raises InvalidRequest where the template
        refuses it, and as `encode`."""
        messages = request.messages
        chars = sum([len(message.get("content") or "") for message in messages])
        if chars > MAX_INLINE_RENDER_CHARS or len(messages) > MAX_INLINE_RENDER_MESSAGES:
            return self._encode_long_chat(request, most_chars)
        return self.encode(self._render(request), most_chars)

    async def encode_with_special_tokens(self, text: str, most_chars: float = inf) -> bytes:
        """A bare prompt, in the tokenizer's own frame (BOS)."""
        ids = self.encode(text, most_chars)
        return self._prefix_ids + (ids if isinstance(ids, bytes) else await ids) + self._suffix_ids

    def encode(self, text: str, most_chars: float = inf) -> EncodedPrompt:
        """The text alone; special tokens written in it count as such. Raises ContextLengthExceeded
        beyond `most_chars`, before that costs a thread seconds."""
        if len(text) > most_chars:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters, which do not fit this model's context, "
                "however they are cut into tokens",
                hint="shorten the prompt, leaving room for the answer",
                param="prompt",
            )
        encode, inline = self._segment_cache.encode, self._inline_chars
        if len(text) <= inline or self._segment_cache.uncached_chars(text) <= inline:
            return encode(text)
        return self._clock.offload(encode, text)

    async def _encode_long_chat(self, request: ChatRequest, most_chars: float) -> bytes:
        ids = self.encode(await self._clock.offload(self._render, request), most_chars)
        return ids if isinstance(ids, bytes) else await ids

    def _render(self, request: ChatRequest) -> str:
        args = request.template_args
        if args and (taken := RESERVED_TEMPLATE_ARGS & args.keys()):
            raise InvalidRequest(
                f"{min(taken)!r} is no argument of the chat template's own",
                hint="it is a field of the request",
                param="chat_template_kwargs",
            )
        return self._template.render(
            request.messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt,
            **args,
        )
