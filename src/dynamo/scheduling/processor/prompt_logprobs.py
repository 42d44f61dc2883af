"""PromptLogprobsReader: the reply of a choice whose prompt has logprobs, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.core.codec import unpack_ids
from dynamo.core.errors import TooLarge, WorkerFailed
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import DecodedPromptToken
from dynamo.core.values import Finish, PromptTokenLogprob, Started, TokenLogprobs
from dynamo.scheduling.processor.vocabulary import Vocabulary

MAX_PROMPT_LOGPROBS = 1 << 15
"""Limit of a prompt's logprobs, which are decoded without a pause in 0.1 s."""


def check_prompt_logprobs(prompt_tokens: int, top: int) -> None:
    """Raise `TooLarge` for a prompt with too many logprobs."""
    count = prompt_tokens * (1 + top)
    if count > MAX_PROMPT_LOGPROBS:
        raise TooLarge(
            f"{prompt_tokens:,} tokens have {count:,} logprobs, limit {MAX_PROMPT_LOGPROBS:,}",
            hint="send a shorter prompt or ask for fewer logprobs of each token",
            field="prompt_logprobs",
        )


class PromptLogprobsReader(Reply):
    """Holds an answer back until it is complete, because the logprobs of the prompt come with its
    end. `answer` reads the tokens; without `has_answer` they are dropped. `send` takes the prompt.
    """

    __slots__ = (
        "_answer",
        "_echo",
        "_has_answer",
        "_ids",
        "_logprobs",
        "_prompt",
        "_send",
        "_vocabulary",
    )

    def __init__(
        self,
        answer: Reply,
        prompt: bytes,
        echo: str,
        send: Callable[[Sequence[DecodedPromptToken]], None],
        vocabulary: Vocabulary,
        *,
        has_answer: bool,
    ) -> None:
        self._answer = answer
        self._prompt = prompt
        self._echo = echo
        self._vocabulary = vocabulary
        self._send = send
        self._has_answer = has_answer
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def begin(self, started: Started) -> None:
        self._answer.begin(started)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        if self._has_answer:
            self._ids += ids
            self._logprobs += logprobs or ()
        return True

    def finish(self, end: Finish) -> None:
        self._send(self._decode_prompt(end.prompt_logprobs))
        if not self._has_answer:
            self._answer.finish(Finish("length"))
        elif not self._ids or self._answer.tokens(self._ids, self._logprobs or None):
            self._answer.finish(end)

    def _decode_prompt(self, logprobs: Sequence[PromptTokenLogprob]) -> list[DecodedPromptToken]:
        """Return the tokens of the prompt. The first one has no logprob. Offsets count the
        characters of `echo`, in which special tokens before the text are missing. Raises
        `WorkerFailed` if logprobs are missing."""
        ids = unpack_ids(self._prompt)
        if len(logprobs) != len(ids) - 1:
            raise WorkerFailed(
                f"the worker answered the logprobs of {len(logprobs)} of {len(ids) - 1} tokens",
                hint="send the request again",
            )
        decoder = self._vocabulary.create_decoder(skip_special=False)
        offsets, length = [], 0
        for token in ids:
            offsets.append(length)
            length += len(decoder.step(token))
        length += len(decoder.flush())
        before = length - len(self._echo) if self._echo else 0
        entries: list[PromptTokenLogprob | None] = [None, *logprobs]
        return [
            self._decode_token(token, entry, max(0, offset - before))
            for token, entry, offset in zip(ids, entries, offsets, strict=True)
        ]

    def _decode_token(
        self, token: int, entry: PromptTokenLogprob | None, offset: int
    ) -> DecodedPromptToken:
        read = self._vocabulary.get_token_bytes
        raw = read(token)
        text = raw.decode(errors="replace")
        if entry is None:
            return DecodedPromptToken(token, text, raw, offset)
        best = ((other, read(other), logprob) for other, logprob in entry.top)
        top = tuple(
            (other, other_raw.decode(errors="replace"), other_raw, logprob)
            for other, other_raw, logprob in best
        )
        return DecodedPromptToken(token, text, raw, offset, entry.logprob, entry.rank, top)
