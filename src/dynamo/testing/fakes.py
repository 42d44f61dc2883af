"""Fakes of the interfaces in `dynamo.core.reply`."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import TextPart
from dynamo.core.values import Finish, Started


class CollectedReply(Reply):
    """Collects the answer. `token_limit`: `tokens` answers False once this many have arrived."""

    def __init__(self, token_limit: int | None = None) -> None:
        self.started: Started | None = None
        self.ids: list[int] = []
        self.extras: list[LogprobsPerToken | None] = []
        self.parts: list[TextPart] = []
        self.end: Finish | None = None
        self._token_limit = token_limit

    def begin(self, started: Started) -> None:
        self.started = started

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        self.ids += ids
        self.extras.append(logprobs)
        return self._token_limit is None or len(self.ids) < self._token_limit

    def text(self, part: TextPart) -> bool:
        self.parts.append(part)
        return True

    def finish(self, end: Finish) -> None:
        self.end = end
