"""AnswerParsing: how the answers of one model are read, and the reader of each answer."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from dynamo.core.fast_path import TokenTexts
from dynamo.core.text import ChatRequest
from dynamo.models.answers.families import FALLBACK, choose_family, make_format
from dynamo.models.answers.reader import AnswerReader
from dynamo.models.card import ModelCard
from dynamo.models.tokenization.tokenizer import Tokenizer
from dynamo.scheduling.processor.vocabulary import Vocabulary

log = logging.getLogger(__name__)

CALL_ID_CHARS = 24


class AnswerParsing:
    """The format of one model's answers.

    `description`: the family, and why that one. `always`: answers are read even if the request has
    no tools. `chars` maps special tokens to the characters that readers see. `token_texts` has the
    texts of tokens in which no marker begins. `stop_token_ids` are the family's.
    Raises `ConfigError` for an unknown format.
    """

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, vocabulary: Vocabulary, rng: Random
    ) -> None:
        template, name = card.chat_template or "", card.tool_format
        family, reason = choose_family(template, name)
        self.description = f"{family.name}: {reason}"
        self._format = make_format(family, template, tokenizer.added_tokens, named=bool(name))
        self._family = family
        self._rng = rng
        search = self._format.search
        self.token_texts = TokenTexts(
            [
                None if text is None or search(text) is not None else text
                for text in vocabulary.token_texts.texts
            ]
        )
        self.chars: Mapping[int, str] = self._format.alphabet.chars
        fallback = family.name == FALLBACK and "tools" not in template and not name
        self.always = not fallback or bool(self._format.openings)
        ids = {token.content: token.id for token in tokenizer.added_tokens}
        self.stop_token_ids = tuple(ids[stop] for stop in family.stops if stop in ids)
        fields = {"model": card.name, "format": family.name, "reason": reason}
        log.info("tool calls are read", extra={"fields": fields})

    def prepare(self, request: ChatRequest, prompt_end: str) -> Callable[[], AnswerReader]:
        """Return a function that makes the reader of one choice."""
        names = request.callable_tools
        tools: dict[str, Any] = {}
        for tool in request.tools:
            function = tool["function"]
            if names is None or function["name"] in names:
                tools[function["name"]] = function.get("parameters") or {}
        return partial(
            AnswerReader,
            self._format,
            tools,
            self._make_call_id,
            prompt_end=prompt_end,
            one_call=not request.parallel_tool_calls,
        )

    def _make_call_id(self, written: str) -> str:
        """Return the id that the model wrote, if its family writes such ids, else a new one."""
        family = self._family
        if family.id_pattern and re.fullmatch(family.id_pattern, written):
            return written
        letters = string.ascii_letters + string.digits
        chars = self._rng.choices(letters, k=family.id_chars or CALL_ID_CHARS)
        return "".join(chars) if family.id_chars else "call_" + "".join(chars)
