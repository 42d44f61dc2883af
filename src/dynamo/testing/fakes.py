"""Fakes of the interfaces in `dynamo.core.reply`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.text import TextPart
from dynamo.core.timing.worker_times import WorkerTimes
from dynamo.core.values import Finish, Started


class CollectedReply(Reply):
    """Collects the answer. The times of the worker are apart from its `end`. `token_limit`:
    `tokens` answers False once this many have arrived."""

    def __init__(self, token_limit: int | None = None) -> None:
        self.started: Started | None = None
        self.ids: list[int] = []
        self.extras: list[LogprobsPerToken | None] = []
        self.parts: list[TextPart] = []
        self.end: Finish | None = None
        self.times: WorkerTimes | None = None
        self._token_limit = token_limit

    def begin(self, started: Started) -> None:
        self.started = replace(started, times=None)

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        self.ids += ids
        self.extras.append(logprobs)
        return self._token_limit is None or len(self.ids) < self._token_limit

    def text(self, part: TextPart) -> bool:
        self.parts.append(part)
        return True

    def finish(self, end: Finish) -> None:
        self.end, self.times = replace(end, times=None), end.times
