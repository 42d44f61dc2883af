"""Fakes of the interfaces in `dynamo.core.reply`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.reply import Engine, LogprobsPerToken, Reply
from dynamo.core.values import EngineInfo, Finish, GenerateRequest, Load, Started


class CollectedReply(Reply):
    """Collects the answer. `token_limit`: `tokens` answers False once this many have arrived."""

    def __init__(self, token_limit: int | None = None) -> None:
        self.started: Started | None = None
        self.ids: list[int] = []
        self.extras: list[LogprobsPerToken | None] = []
        self.end: Finish | None = None
        self._token_limit = token_limit

    def begin(self, started: Started) -> None:
        self.started = started

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        self.ids += ids
        self.extras.append(logprobs)
        return self._token_limit is None or len(self.ids) < self._token_limit

    def finish(self, end: Finish) -> None:
        self.end = end


class ScriptedEngine(Engine):
    """Answers every request with the same tokens, one call each and a turn of the loop between.
    `error` is raised after the tokens in place of a finish. `endless` waits to be cancelled
    instead."""

    def __init__(
        self,
        info: EngineInfo,
        started: Started,
        ids: Sequence[int],
        end: Finish,
        *,
        error: DynamoError | None = None,
        endless: bool = False,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.contexts: list[Context] = []
        self.cancelled = asyncio.Event()
        self._info = info
        self._started = started
        self._ids = tuple(ids)
        self._end = end
        self._error = error
        self._endless = endless

    async def start(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerateRequest, context: Context, reply: Reply) -> None:
        self.requests.append(request)
        self.contexts.append(context)
        try:
            await self._play_script(reply)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def report_load(self) -> Load:
        return Load()

    async def stop(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _play_script(self, reply: Reply) -> None:
        reply.begin(self._started)
        for token in self._ids:
            if not reply.tokens((token,)):
                return
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        if self._endless:
            await asyncio.Event().wait()
        reply.finish(self._end)
