"""TokenCounter: tells the tokens of a choice before their text is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.values import Finish, Started


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
