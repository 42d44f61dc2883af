"""The routes /tokenize, /detokenize and /tokenizer_info, with the bodies of vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.gateway import DEFAULT_MODEL, Gateway
from dynamo.application.generation.concurrency_limit import ConcurrencyLimits
from dynamo.application.openai.body import decode_body
from dynamo.application.openai.chat import ChatBody, chat_parts, chat_request
from dynamo.application.openai.generation_body import Neutral, TokenId, UnsupportedFields
from dynamo.core.errors import InvalidRequest

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that reads the tokenizers of all models here."""


class TokenizeBody(msgspec.Struct):
    """The body of /tokenize: a text in `prompt`, or a conversation in `messages`.

    llama.cpp's body has a text in `content`, and asks for special tokens and pieces.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    parse_special: Annotated[Any, Neutral(True)] = None
    chat_template: Annotated[Any, Neutral()] = None


class DetokenizeBody(msgspec.Struct):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_unsupported_fields = UnsupportedFields(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class TokenizationHandler:
    """Converts text to token ids and back with the model's tokenizer and chat template.

    Requests count in `concurrency`, like those that generate text.
    """

    def __init__(
        self, gateway: Gateway, unknown_roles: str, concurrency: ConcurrencyLimits
    ) -> None:
        self._gateway = gateway
        self._unknown_roles = unknown_roles
        self._concurrency = concurrency

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        body = decode_body(_tokenize_decoder, exchange.request)
        _, served = self._gateway.find(body.model)
        async with self._concurrency[served.names[0]].slot():
            answer = await self._tokenize(body)
        exchange.send_value(answer)

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        body = decode_body(_detokenize_decoder, exchange.request)
        _, served = self._gateway.find(body.model)
        async with self._concurrency[served.names[0]].slot():
            text = await served.processor.detokenize(body.tokens)
        answer = {"prompt": text}
        if body.model is None:  # llama.cpp's clients name no model and read `content`
            answer["content"] = text
        exchange.send_value(answer)

    async def describe(self, exchange: Exchange) -> None:
        """GET /tokenizer_info. Evaluation programs read it before they use /tokenize."""
        _, served = self._gateway.find(DEFAULT_MODEL)
        info = {
            "tokenizer_class": TOKENIZER_CLASS,
            "bos_token": served.bos_token or None,
            "eos_token": served.eos_token or None,
            "model_max_length": served.context_tokens,
        }
        exchange.send_value(info)

    async def _tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        _unsupported_fields.check(body)
        model, served = self._gateway.find(body.model)
        processor = served.processor
        if body.messages is not None:
            chat = ChatBody(
                messages=body.messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            request = chat_request(chat_parts(chat), model, self._unknown_roles)
            special = body.add_special_tokens is True
            ids = await processor.tokenize(request, add_special=special)
        elif body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await processor.tokenize(body.prompt, add_special=special)
        elif body.content is not None:
            ids = await processor.tokenize(body.content, add_special=body.add_special)
            if not body.with_pieces:
                return {"tokens": ids}
            return {"tokens": list(map(_piece, ids, await processor.token_bytes(ids)))}
        else:
            raise InvalidRequest("required, but missing", field="prompt")
        strings = await processor.token_strings(ids) if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": served.context_tokens, "tokens": ids}
        return answer | {"token_strs": strings}


def _piece(token_id: int, raw: bytes) -> dict[str, Any]:
    """Return a token in llama.cpp's form: bytes that are no UTF-8 are a list of numbers."""
    try:
        return {"id": token_id, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(raw)}
