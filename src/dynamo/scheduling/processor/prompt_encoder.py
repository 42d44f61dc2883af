"""Encoding of prompts: chat template, then tokenizer. Only short work runs on the event loop."""

from __future__ import annotations

from asyncio import Lock
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

from dynamo.core.clock import Clock
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.text import ChatRequest
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.template_forms import content_text
from dynamo.models.tokenization.encoders import FastEncoder
from dynamo.models.tokenization.segment_cache import SegmentCache
from dynamo.models.tokenization.tokenizer import Tokenizer

MAX_INLINE_CHARS = 2_000
MAX_FAST_INLINE_CHARS = 6_000
"""Uncached characters that the slow and the fast encoder encode on the event loop, in 1 ms."""
MAX_INLINE_RENDER_CHARS = 400_000
MAX_INLINE_RENDER_MESSAGES = 100
"""Limits of a conversation that is rendered on the event loop.

A template that once exceeded its bounds is always rendered by a thread."""
STEP_CHARS = 1 << 16
"""Characters that a thread encodes in one step of `tokenize`, in about 10 ms."""
MAX_CHARS_PER_TOKEN = 16
"""A prompt with more characters for each token of the context cannot fit: only runs of one mark
have longer tokens."""
MAX_UNCUT_CHARS_PER_TOKEN = 6
"""Texts for `tokenize`, and parts of prompts without a safe cut, are refused above this many
characters for each token of the context. Text has about four; only white space and repeated marks
have more than six."""
RESERVED_TEMPLATE_ARGS = {"self", "messages", "tools", "add_generation_prompt"}

EncodedPrompt = bytes | Awaitable[bytes]
"""Packed ids; awaitable when a thread encodes them."""


class PromptEncoder:
    """Turns conversations and texts into packed ids, with a cache of encoded segments."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, clock: Clock, context_tokens: int
    ) -> None:
        self._template = template
        self._clock = clock
        self._encode = tokenizer.encode
        self._tokenize_lock = Lock()
        self._max_tokens = context_tokens
        self._max_chars = min(
            tokenizer.max_chars_of(context_tokens), MAX_CHARS_PER_TOKEN * context_tokens
        )
        self._max_uncut_chars = max(STEP_CHARS, MAX_UNCUT_CHARS_PER_TOKEN * context_tokens)
        self._segment_cache = SegmentCache(
            tokenizer,
            max_segment_chars=self._max_uncut_chars,
            max_tokens=context_tokens,
        )
        fast = tokenizer.encoder_name == FastEncoder.name
        self._inline_chars = MAX_FAST_INLINE_CHARS if fast else MAX_INLINE_CHARS
        self._prefix_ids, self._suffix_ids = tokenizer.prompt_affixes

    def encode_chat(self, request: ChatRequest) -> EncodedPrompt:
        """Render the conversation with the model's template and encode it. Raises InvalidRequest
        when the template refuses it, and as `encode`."""
        messages = request.messages
        chars = _chars_of(messages)
        if (
            chars > MAX_INLINE_RENDER_CHARS
            or len(messages) > MAX_INLINE_RENDER_MESSAGES
            or self._template.was_too_costly
        ):
            return self._encode_long_chat(request, chars)
        return self.encode(self._render(request))

    async def encode_with_special_tokens(self, text: str) -> bytes:
        """Encode a bare prompt with the tokenizer's special tokens around it (BOS)."""
        ids = self.encode(text)
        return self._prefix_ids + (ids if isinstance(ids, bytes) else await ids) + self._suffix_ids

    def encode(self, text: str) -> EncodedPrompt:
        """Encode a text. Special tokens in the text are recognised. Raises ContextLengthExceeded
        for a text that cannot fit, before a thread spends seconds on it."""
        if len(text) > self._max_chars:
            _check_chars(len(text), self._max_chars)
        encode, inline = self._segment_cache.encode, self._inline_chars
        if len(text) <= inline or self._segment_cache.uncached_chars(text) <= inline:
            return encode(text)
        return self._clock.offload(encode, text)

    async def tokenize(self, prompt: str | ChatRequest, *, add_special: bool = False) -> bytes:
        """Encode a text or conversation that no engine will see: nothing of it is cached.

        One thread at a time encodes long texts, step by step, until the caller is cancelled. Raises
        ContextLengthExceeded for more than the context, and InvalidRequest as `encode_chat`.
        """
        max_chars = self._max_uncut_chars
        if isinstance(prompt, str):
            text = prompt
        else:
            _check_chars(_chars_of(prompt.messages), max_chars)
            text = await self._clock.offload(self._render, prompt)
        _check_chars(len(text), max_chars)
        inline = len(text) <= self._inline_chars
        ids = self._encode(text) if inline else await self._encode_in_steps(text)
        if len(ids) // TOKEN_BYTES > self._max_tokens:
            raise ContextLengthExceeded(
                f"the text has more tokens than {self._max_tokens}, this model's context",
                hint="send a shorter text",
                param="prompt",
            )
        return self._prefix_ids + ids + self._suffix_ids if add_special else ids

    async def _encode_in_steps(self, text: str) -> bytes:
        """Return the ids of `text`, or of its beginning with more than the context."""
        segments = iter(await self._clock.offload(self._segment_cache.split, text))
        ids = b""
        while len(ids) // TOKEN_BYTES <= self._max_tokens:
            async with self._tokenize_lock:
                part = await self._clock.offload(self._encode_step, segments)
            if not part:
                break
            ids += part
        return ids

    def _encode_step(self, segments: Iterator[str]) -> bytes:
        """Return the ids of the next segments; b"" after the last one."""
        parts: list[bytes] = []
        chars = 0
        for segment in segments:
            parts.append(self._encode(segment))
            chars += len(segment)
            if chars >= STEP_CHARS:
                break
        return b"".join(parts)

    async def _encode_long_chat(self, request: ChatRequest, chars: int) -> bytes:
        _check_chars(chars, self._max_chars)
        ids = self.encode(await self._clock.offload(self._render, request))
        return ids if isinstance(ids, bytes) else await ids

    def _render(self, request: ChatRequest) -> str:
        args = request.template_args
        if args and (taken := RESERVED_TEMPLATE_ARGS & args.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs cannot contain {min(taken)!r}",
                hint="set the field of the request with this meaning instead",
                param="chat_template_kwargs",
            )
        if request.continue_final:
            return self._template.render_open(request.messages, request.tools, **args)
        return self._template.render(
            request.messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt,
            **args,
        )


def _chars_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the characters of all contents."""
    chars = 0
    for message in messages:
        content = message["content"]
        chars += len(content if type(content) is str else content_text(content))
    return chars


def _check_chars(chars: int, max_chars: float) -> None:
    if chars > max_chars:
        raise ContextLengthExceeded(
            f"the prompt has {chars} characters; this model's context has at most {max_chars:.0f}",
            hint="shorten the prompt and leave room for the answer",
            param="prompt",
        )
