"""ChatProcessor: text requests and replies above, token requests and replies below."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.codec import unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ContextLengthExceeded, InvalidRequest
from dynamo.core.features import GRAMMAR_FEATURES
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.reply import LogprobsPerToken, Reply, SendRequest
from dynamo.core.settings.schema import SamplingSettings
from dynamo.core.tasks import run_in_slices
from dynamo.core.text import ChatRequest, CompletionRequest, TextOptions, TextReply
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    RequestGroup,
    SamplingParams,
    Started,
    StopConditions,
    StructuredOutput,
)
from dynamo.models.answers.reader import AnswerReader
from dynamo.models.card import ModelCard
from dynamo.models.chat_template import ChatTemplate
from dynamo.models.grammar.checker import GrammarChecker
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.scheduling.processor.answer_parsing import AnswerParsing
from dynamo.scheduling.processor.detokeniser import Detokeniser
from dynamo.scheduling.processor.parsed_detokeniser import ParsedDetokeniser
from dynamo.scheduling.processor.prompt_encoder import EncodedPrompt, PromptEncoder
from dynamo.scheduling.processor.prompt_logprobs import PromptLogprobsReader, check_prompt_logprobs
from dynamo.scheduling.processor.request_defaults import RequestDefaults
from dynamo.scheduling.processor.stop_strings import StopStrings
from dynamo.scheduling.processor.vocabulary import Vocabulary


class TokenCounter(Reply):
    """Calls `count(tokens)` for each group of tokens, then passes them to `answer`. The fast path
    stays closed, because it tells no tokens."""

    __slots__ = ("_answer", "_count")

    def __init__(self, answer: Reply, count: Callable[[int], None]) -> None:
        self._answer = answer
        self._count = count

    def begin(self, started: Started) -> None:
        self._answer.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        self._count(len(ids))
        return self._answer.tokens(ids, logprobs)

    def finish(self, end: Finish) -> None:
        self._answer.finish(end)


T = TypeVar("T")
CHOICES_PER_SLICE = 16
"""So many choices of a request are sent in one iteration of the event loop."""
PROMPT_END_TOKENS = 24
"""So many tokens at the end of a prompt tell whether the answer begins in reasoning, and what its
text continues with."""
MAX_INLINE_IDS = 1_000
"""Up to this many ids are decoded on the event loop, in at most 1 ms."""


class ChatProcessor:
    """The processor of one model, which sends token requests through `send`.

    The constructor reads the whole vocabulary, which takes milliseconds: call it off the event
    loop. `rng` draws the sampling seeds of requests without one.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        send: SendRequest,
        sampling: SamplingSettings,
        clock: Clock,
        rng: Random | None = None,
    ) -> None:
        rng = rng or Random()
        self.card = card
        self._tokenizer = tokenizer
        self._send = send
        self._clock = clock
        self._prompt_encoder = PromptEncoder(tokenizer, template, clock, card.context_tokens)
        self._vocabulary = Vocabulary(tokenizer)
        self._vocab_size = max(card.vocab_size, tokenizer.vocab_size)
        self._default_stop_strings = tuple(filter(None, sampling.stop_tokens))
        self._eos_token_ids = tuple(card.eos_token_ids)
        self._answers = AnswerParsing(card, tokenizer, self._vocabulary, rng)
        engine = card.engine
        own_grammars = engine is None or GRAMMAR_FEATURES[-1] in engine.features
        self._grammar_checker = GrammarChecker() if own_grammars else None
        self._takes_bias = engine is None or "logit_bias" in engine.features
        of_engine = {} if engine is None else engine.sampling
        self._defaults = RequestDefaults(
            sampling, card.generation, card.context_tokens, rng, of_engine
        )

    @property
    def tool_format(self) -> str:
        """The family whose tool calls are read from answers, and why that one."""
        return self._answers.description

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling values of requests without their own."""
        return self._defaults.sampling

    def chat(self, request: ChatRequest, context: Context, reply: TextReply) -> Awaitable[None]:
        """Continue a conversation until every choice is complete or the reader wants no more.
        Raises InvalidRequest, ContextLengthExceeded, and the errors of the workers."""
        ids = self._prompt_encoder.encode_chat(request)
        if (
            not isinstance(ids, bytes)
            or request.options.structured is not None
            or request.call_mode != "free"
        ):
            return self._chat_when_ready(ids, request, context, reply)
        if request.tools or self._answers.always:
            return self._send_parsed(ids, request, context, reply)
        max_tokens = self._accept(ids, request.options, reply)
        return self._send_choices(ids, max_tokens, request.options, context, reply)

    async def complete(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> None:
        """Continue a text or token ids; `echo` repeats the prompt first. Otherwise like `chat`."""
        send = await self.prepare_completion(request, context, reply)
        await send()

    async def prepare_completion(
        self, request: CompletionRequest, context: Context, reply: TextReply
    ) -> Callable[[], Awaitable[None]]:
        """Encode and check a completion, and return the function that sends it to the workers.

        A caller with several prompts prepares all of them first, so that none is refused after the
        answers to others have begun. Raises as `chat`.
        """
        prompt, options = request.prompt, request.options
        if isinstance(prompt, str):
            ids = await self._prompt_encoder.encode_with_special_tokens(prompt)
            echo = prompt if request.echo else ""
        else:
            ids = prompt
            self._defaults.resolve_max_tokens(options, len(ids) // TOKEN_BYTES)
            self._check_ids(unpack_ids(ids), "prompt")
            echo = await self._decode(unpack_ids(ids)) if request.echo else ""
        max_tokens = self._accept(ids, options, reply, echo)
        await self._check_structured(options)
        return partial(self._send_choices, ids, max_tokens, options, context, reply, echo)

    async def tokenize(self, prompt: str | ChatRequest, *, add_special: bool = False) -> list[int]:
        """Return the ids of a conversation or a text (`add_special`: with BOS and the like). Raises
        ContextLengthExceeded and leaves nothing in caches."""
        return list(
            unpack_ids(await self._prompt_encoder.tokenize(prompt, add_special=add_special))
        )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens. Raises InvalidRequest for an unknown id,
        ContextLengthExceeded for more ids than the context has."""
        if len(ids) > self.card.context_tokens:
            raise ContextLengthExceeded(
                f"{len(ids)} are more tokens than {self.card.context_tokens}, this model's context",
                hint="send fewer tokens at a time",
                param="tokens",
            )
        self._check_ids(ids, "tokens")
        return await self._decode(ids)

    async def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's string of each id, in the tokenizer's alphabet."""
        return [text or "" for text in await self._map_ids(self._tokenizer.id_to_token, ids)]

    async def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id, whose concatenation is the text."""
        return await self._map_ids(self._vocabulary.get_token_bytes, ids)

    async def _map_ids(self, convert: Callable[[int], T], ids: Sequence[int]) -> list[T]:
        return await self._convert(lambda ids: list(map(convert, ids)), ids)

    async def _decode(self, ids: Sequence[int]) -> str:
        return await self._convert(self._vocabulary.decode, ids)

    async def _convert(self, convert: Callable[[Sequence[int]], T], ids: Sequence[int]) -> T:
        """Convert ids, many of them in a thread."""
        short = len(ids) <= MAX_INLINE_IDS
        return convert(ids) if short else await self._clock.offload(convert, ids)

    async def _chat_when_ready(
        self, ids: EncodedPrompt, request: ChatRequest, context: Context, reply: TextReply
    ) -> None:
        prompt = ids if isinstance(ids, bytes) else await ids
        await self._check_structured(request.options)
        for arguments, field in self._answers.argument_outputs(request):
            if self._grammar_checker is not None:
                await self._grammar_checker.check(arguments, field, request.options.caller)
        structured = request.options.structured
        limited = structured is not None and structured.reasoning_limit is not None
        if request.tools or self._answers.always or limited:
            request = await self._constrain(prompt, request)
            await self._send_parsed(prompt, request, context, reply)
            return
        max_tokens = self._accept(prompt, request.options, reply)
        await self._send_choices(prompt, max_tokens, request.options, context, reply)

    def _send_parsed(
        self, prompt: bytes, request: ChatRequest, context: Context, reply: TextReply
    ) -> Awaitable[None]:
        options = request.options
        max_tokens = self._accept(prompt, options, reply)
        if request.callable_tools == () and self._takes_bias:
            options = self._answers.ban_calls(options)
        make_reader = self._answers.prepare(request, self._decode_end(prompt))
        return self._send_choices(
            prompt, max_tokens, options, context, reply, make_reader=make_reader
        )

    async def _constrain(self, prompt: bytes, request: ChatRequest) -> ChatRequest:
        """Return the request with the structured output of its calls, of its reasoning and of its
        text. Raises as `GrammarChecker.check`, and `Unsupported`."""
        structured, checker = request.options.structured, self._grammar_checker
        if request.call_mode != "free" or (structured is not None and checker is not None):
            structured = self._answers.constrain(request, self._decode_end(prompt))
        elif structured is not None and structured.kind != "text":
            structured = self._answers.mark_reasoning(structured, self._decode_end(prompt))
        else:
            return request
        if structured is not None and structured.kind == "calls" and checker is not None:
            calls = StructuredOutput("calls", structured.value)
            await checker.check(calls, "tools", request.options.caller)
        return replace(request, options=replace(request.options, structured=structured))

    async def _check_structured(self, options: TextOptions) -> None:
        """Raise `InvalidRequest` for a structured output that our engines cannot enforce. Other
        engines check outputs by themselves."""
        wanted = options.structured
        if wanted is not None and wanted.kind != "text" and self._grammar_checker is not None:
            wanted = replace(wanted, reasoning_limit=None, soft_limit=False)
            await self._grammar_checker.check(wanted, options.structured_field, options.caller)

    def _decode_end(self, prompt: bytes) -> str:
        return self._vocabulary.decode(unpack_ids(prompt[-PROMPT_END_TOKENS * TOKEN_BYTES :]))

    def _accept(self, prompt: bytes, options: TextOptions, reply: TextReply, echo: str = "") -> int:
        """Check a prompt, report its length to `reply` and return the answer's maximum length."""
        if options.sampling.logit_bias:
            self._check_ids(options.sampling.logit_bias, "logit_bias")
        prompt_tokens = len(prompt) // TOKEN_BYTES
        max_tokens = self._defaults.resolve_max_tokens(options, prompt_tokens)
        if echo and options.n > 1:
            reply.prompt(prompt_tokens, (options.n - 1) * len(echo.encode()))
        else:
            reply.prompt(prompt_tokens)
        return max_tokens

    def _send_choices(
        self,
        prompt: bytes,
        max_tokens: int,
        options: TextOptions,
        context: Context,
        reply: TextReply,
        echo: str = "",
        make_reader: Callable[[], AnswerReader] | None = None,
    ) -> Awaitable[None]:
        request = GenerateRequest(
            request_id=context.request_id,
            model=self.card.names[0],
            token_ids=prompt,
            sampling=self._defaults.resolve_sampling(options.sampling),
            stops=self._stop_conditions(options, max_tokens, make_reader is not None),
            top_logprobs=options.top_logprobs,
            prompt_logprobs=options.prompt_logprobs,
            salt=options.salt,
            priority=options.priority,
            structured=options.structured,
            adapter=options.adapter,
        )
        stops = self._stop_strings(options)
        plain = make_reader is None and options.prompt_logprobs is None and not options.count_tokens
        end = prompt[-PROMPT_END_TOKENS * TOKEN_BYTES :]
        if options.n == 1 and max_tokens and plain:
            choice = Detokeniser(0, self._vocabulary, options, stops, reply, echo, end)
            return self._send(request, context, choice)
        choices = [
            Detokeniser(choice, self._vocabulary, options, stops, reply, echo, end)
            if make_reader is None
            else ParsedDetokeniser(
                choice, self._vocabulary, options, stops, reply, end, make_reader(), self._answers
            )
            for choice in range(options.n)
        ]
        if options.prompt_logprobs is not None:
            return self._read_prompt(request, context, choices, reply, echo)
        if not max_tokens:
            return _finish_without_tokens(choices)
        readers: Sequence[Reply] = choices
        if options.count_tokens:
            count = reply.count_tokens
            readers = [TokenCounter(choice, partial(count, n)) for n, choice in enumerate(choices)]
        return self._send_readers(request, context, readers)

    def _stop_conditions(
        self, options: TextOptions, max_tokens: int, has_reader: bool
    ) -> StopConditions:
        stop_ids = options.stop_token_ids
        if not options.ignore_eos:
            further = self._answers.stop_token_ids if has_reader else ()
            stop_ids = tuple(dict.fromkeys((*self._eos_token_ids, *stop_ids, *further)))
        min_tokens = min(max_tokens, options.min_tokens)
        return StopConditions(max_tokens, min_tokens, stop_ids, options.ignore_eos)

    def _stop_strings(self, options: TextOptions) -> StopStrings | None:
        """Return what ends an answer. A grammar ends by itself and is stronger."""
        structured = options.structured
        if structured is not None and structured.kind not in ("text", "calls"):
            return None
        strings = (*options.stop, *self._default_stop_strings)
        return StopStrings(strings, include_in_output=options.include_stop) if strings else None

    def _read_prompt(
        self,
        request: GenerateRequest,
        context: Context,
        choices: Sequence[Detokeniser],
        reply: TextReply,
        echo: str,
    ) -> Awaitable[None]:
        """Send a request for logprobs of its prompt. An engine generates at least one token, which
        is dropped if none is wanted."""
        check_prompt_logprobs(len(request.token_ids) // TOKEN_BYTES, request.prompt_logprobs or 0)
        has_answer = request.stops.max_tokens > 0
        readers = [
            PromptLogprobsReader(
                choice,
                request.token_ids,
                echo,
                partial(reply.prompt_logprobs, number),
                self._vocabulary,
                has_answer=has_answer,
            )
            for number, choice in enumerate(choices)
        ]
        if not has_answer:
            request = replace(request, stops=StopConditions(1, ignore_eos=True))
        return self._send_readers(request, context, readers)

    def _send_readers(
        self, request: GenerateRequest, context: Context, readers: Sequence[Reply]
    ) -> Awaitable[None]:
        if len(readers) == 1:
            return self._send(request, context, readers[0])
        return fan_out(self._send, request, context, readers)

    def _check_ids(self, ids: Collection[int], param: str) -> None:
        for token_id in (min(ids), max(ids)) if ids else ():
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is not in the vocabulary of {self._vocab_size}",
                    param=param,
                )


async def fan_out(
    send: SendRequest, request: GenerateRequest, context: Context, choices: Sequence[Reply]
) -> None:
    """Send each choice as a separate request. The first failure cancels the others."""
    request = replace(request, group=RequestGroup(request))

    async def send_choice(number: int, choice: Reply) -> None:
        await send(replace(request, choice=number), context, choice)

    work = (send_choice(number, choice) for number, choice in enumerate(choices))
    await run_in_slices(work, CHOICES_PER_SLICE)


async def _finish_without_tokens(choices: Sequence[Detokeniser]) -> None:
    """Answer a request for zero tokens."""
    for choice in choices:
        choice.begin(Started())
        choice.finish(Finish("length"))
