"""TextProcessor: the processor of a model without a tokenizer, whose workers take and give text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from dynamo.core.context import Context
from dynamo.core.errors import Unsupported
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import LogprobsPerToken, Reply, SendRequest
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.text import (
    REPLACEMENT,
    CallEnded,
    ChatRequest,
    CompletionRequest,
    ReasoningDelta,
    TextDelta,
    TextFinish,
    TextOptions,
    TextPart,
    TextReply,
    split_cut_character,
)
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
    TextParameters,
)
from dynamo.models.card import ModelCard
from dynamo.scheduling.processor.chat_processor import fan_out

OPENAI_SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
"""The values that answers show where neither caller nor configuration names one."""
_encode = msgspec.json.Encoder().encode


class TextAnswerReply(Reply):
    """Passes the parts of one choice on as they come. U+FFFD at the end of a text is held until
    more comes: a server may send it for the character inside which an answer is cut."""

    __slots__ = ("_called", "_choice", "_echo", "_held", "_offset", "_reply")

    def __init__(self, choice: int, reply: TextReply, echo: str) -> None:
        self._choice = choice
        self._reply = reply
        self._echo = echo
        self._called = False
        self._offset = 0
        self._held: TextDelta | ReasoningDelta | None = None

    def begin(self, started: Started) -> None:
        self._reply.begin(self._choice, started)
        if self._echo:
            self._reply.text(self._choice, self._echo)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del ids, logprobs
        raise Unsupported("tokens came for a model whose tokenizer is not at hand")

    def text(self, part: TextPart) -> bool:
        held, self._held = self._held, None
        if held is not None:
            if type(held) is not type(part):
                return self._send(held) and self.text(part)
            part = replace(part, text=held.text + part.text)
        if isinstance(part, TextDelta | ReasoningDelta) and part.text.endswith(REPLACEMENT):
            whole, cut = split_cut_character(part.text)
            self._held = type(part)(cut)
            part = replace(part, text=whole)
            if not whole and not getattr(part, "logprobs", None):
                return True
        return self._send(part)

    def _send(self, part: TextPart) -> bool:
        if not isinstance(part, TextDelta):
            self._called = self._called or isinstance(part, CallEnded)
            return self._reply.event(self._choice, part)
        logprobs = part.logprobs
        if logprobs is None:
            return self._reply.text(self._choice, part.text)
        offset = self._offset
        self._offset += len(part.text)
        placed = [replace(logprob, offset=offset) for logprob in logprobs]
        return self._reply.text(self._choice, part.text, placed)

    def restart(self) -> bool:
        if not self._reply.restart(self._choice):
            return False
        self._called, self._offset, self._held = False, 0, None
        if self._echo:
            self._reply.text(self._choice, self._echo)
        return True

    def finish(self, end: Finish) -> None:
        if self._held is not None and end.reason != "length" and not self._send(self._held):
            return
        first = self._choice == 0  # the choices of a prompt share its tokens
        text_end = TextFinish(
            "tool_calls" if self._called and end.reason == "stop" else end.reason,
            end.completion_tokens,
            end.stop_string or None,
            reasoning_tokens=end.reasoning_tokens,
            prompt_tokens=end.prompt_tokens if first else 0,
            cached_tokens=(end.cached_tokens or 0) if first else 0,
        )
        self._reply.finish(self._choice, text_end)


def _refuser(what: str) -> Callable[..., Awaitable[NoReturn]]:
    async def refuse(processor: TextProcessor, *_: Any, **__: Any) -> NoReturn:
        processor.refuse(what, "model")

    return refuse


class TextProcessor:
    """Sends conversations and prompts as they are through `send`, with what the caller and the
    configuration say of sampling. The other values are the server's own.

    Routers count `TOKEN_BYTES` bytes of the text as a token, and find common beginnings of texts.
    """

    tool_format = "the server's own: it reads tool calls and reasoning"

    def __init__(self, card: ModelCard, send: SendRequest, sampling: SamplingSettings) -> None:
        self.card = card
        self._send = send
        self._stop_strings = tuple(filter(None, sampling.stop_tokens))
        names = ("temperature", "top_p", "top_k", "max_tokens")
        values = {name: getattr(sampling, name) for name in names}
        self._defaults = {name: value for name, value in values.items() if value is not None}
        shown = {name: value for name, value in self._defaults.items() if name != "max_tokens"}
        self.default_sampling = replace(OPENAI_SAMPLING, **shown)

    async def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> None:
        """Continue a conversation until every choice is complete or the reader wants no more.
        Raises `Unsupported` and the errors of the workers."""
        conversation: dict[str, Any] = {"messages": request.messages}
        values: dict[str, Any] = {}
        if request.tools:
            conversation = {"tools": request.tools} | conversation
            values |= request.tool_options()
        if request.template_args:
            values["chat_template_kwargs"] = request.template_args
        if not request.add_generation_prompt:
            values["add_generation_prompt"] = False
        if request.continue_final:
            values["continue_final_message"] = True
        options = request.options
        wanted = options.structured
        if wanted is not None and wanted.reasoning_limit is not None:
            if not wanted.soft_limit:
                values["thinking_token_budget"] = wanted.reasoning_limit
            wanted = None if wanted.kind == "text" else replace(wanted, reasoning_limit=None)
            options = replace(options, structured=wanted)
        values |= self._sampling(options)
        reply.prompt(0)
        parameters = TextParameters(chat=True, values=values)
        await self._send_choices(_pad(_encode(conversation)), parameters, options, context, reply)

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Continue a text; `echo` repeats it first. Otherwise like `chat`."""
        send = await self.prepare_completion(request, context, reply)
        await send()

    async def prepare_completion(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> Callable[[], Any]:
        """Check a completion, and return the function that sends it. Raises as `chat`."""
        prompt, options = request.prompt, request.options
        if not isinstance(prompt, str):
            self.refuse("token ids as a prompt", "prompt")
        parameters = TextParameters(chat=False, values=self._sampling(options))
        echo = prompt if request.echo else ""
        reply.prompt(0, (options.n - 1) * len(echo.encode()))
        packed = _pad(_encode({"prompt": prompt}))
        return partial(self._send_choices, packed, parameters, options, context, reply, echo)

    tokenize = _refuser("/tokenize")
    detokenize = _refuser("/detokenize")
    token_strings = _refuser("the strings of token ids")
    token_bytes = _refuser("the bytes of token ids")

    def refuse(self, what: str, param: str) -> NoReturn:
        """Raise `Unsupported` for what needs a tokenizer."""
        raise Unsupported(
            f"{what}: the tokenizer of {self.card.name} is not at hand, only its server",
            hint="name the model's folder or file after the server's URL at the start",
            param=param,
        )

    def _sampling(self, options: TextOptions) -> dict[str, Any]:
        """Return what the caller and the configuration say of sampling, by OpenAI's names. Raises
        `Unsupported` for what names tokens."""
        if options.sampling.logit_bias:
            self.refuse("logit_bias", "logit_bias")
        if options.prompt_logprobs is not None:
            self.refuse("logprobs of the prompt", "prompt_logprobs")
        if options.stop_token_ids:
            self.refuse("stop_token_ids", "stop_token_ids")
        values: dict[str, Any] = self._defaults | msgspec.to_builtins(options.sampling)
        stop = (*options.stop, *self._stop_strings)
        own_values = {
            "max_tokens": options.max_tokens,
            "stop": stop or None,
            "min_tokens": options.min_tokens or None,
            "ignore_eos": options.ignore_eos or None,
            "skip_special_tokens": None if options.skip_special_tokens else False,
            "include_stop_str_in_output": options.include_stop or None,
        }
        return values | {name: value for name, value in own_values.items() if value is not None}

    async def _send_choices(
        self,
        prompt: bytes,
        parameters: TextParameters,
        options: TextOptions,
        context: Context,
        reply: TextReply,
        echo: str = "",
    ) -> None:
        max_tokens = parameters.values.get("max_tokens")
        stops = StopConditions() if max_tokens is None else StopConditions(max_tokens)
        request = GenerateRequest(
            request_id=context.request_id,
            model=self.card.name,
            token_ids=prompt,
            sampling=SamplingParams(),
            stops=stops,
            top_logprobs=options.top_logprobs,
            salt=options.salt,
            priority=options.priority,
            structured=options.structured,
            adapter=options.adapter,
            text=parameters,
        )
        answers = [TextAnswerReply(choice, reply, echo) for choice in range(options.n)]
        if len(answers) == 1:
            await self._send(request, context, answers[0])
        else:
            await fan_out(self._send, request, context, answers)


def _pad(text: bytes) -> bytes:
    """Fill JSON up to whole tokens."""
    return text + b" " * (-len(text) % TOKEN_BYTES)
