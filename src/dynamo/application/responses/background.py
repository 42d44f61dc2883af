"""Responses that are generated without their client."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import msgspec

from dynamo.application.exchange import Exchange
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.responses.event_log import EventLog
from dynamo.application.responses.store import ResponseStore
from dynamo.application.responses.turn import Turn
from dynamo.core.clock import Clock
from dynamo.core.errors import (
    DynamoError,
    InternalError,
    Overloaded,
    ServerStopped,
    StoreUnavailable,
)
from dynamo.core.tasks import BackgroundTasks, wait_at_most

logger = logging.getLogger(__name__)

MAX_RUNNING = 256
"""Responses in the background of a process. Each holds its input, which no client waits for.
With several API keys, the responses of one key take at most as many places as it leaves free."""
RENEWAL_S = 1.0
"""So often this process renews its responses, and looks which ones were cancelled elsewhere."""


class RunningResponse(msgspec.Struct):
    """A response that is generated, and the log of its events, empty unless it is streamed."""

    task: asyncio.Task[None]
    log: EventLog


class BackgroundResponses:
    """Generates responses in tasks of this process. Their state is in the store, where each process
    of the deployment can read and cancel them."""

    def __init__(
        self,
        generation: GenerationHandler,
        store: ResponseStore,
        clock: Clock,
        *,
        several_owners: bool = False,
    ) -> None:
        self._generation = generation
        self._several_owners = several_owners
        self._owners: Counter[str] = Counter()
        self._store = store
        self._clock = clock
        self._tasks = BackgroundTasks()
        self._running: dict[str, RunningResponse] = {}
        self._renewal: asyncio.Task[None] | None = None

    async def answer(self, turn: Turn, exchange: Exchange) -> None:
        """Store the response and begin to generate it, and stream it to its client if that wants a
        stream. Raises `StoreUnavailable`, `Overloaded`, `SlowReader`."""
        log, response = EventLog(), turn.writer.response
        start = turn.writer.encode_start() if exchange.streaming else b""
        if start:
            log.write(start)
        exchange.output = log
        self._take_place(turn.owner)
        try:
            events = log.take_batch()
            await self._store.add(turn.owner, response, turn.items, running=True, events=events)
        except BaseException:
            self._release_place(turn.owner)
            raise
        exchange.request.release_body()
        task = self._tasks.start(self._generate(turn, exchange, log), response["id"])
        self._running[response["id"]] = RunningResponse(task, log)
        if self._renewal is None or self._renewal.done():
            self._renewal = self._tasks.start(self._renew(), "renew responses")
        if start:
            await log.serve(exchange, start)
        else:
            exchange.send_value(response)

    def _take_place(self, owner: str) -> None:
        """Count a response of `owner`. Raises `Overloaded`."""
        total, own = self._owners.total(), self._owners[owner]
        if total >= MAX_RUNNING:
            raise Overloaded(f"{MAX_RUNNING} responses are generated in the background already")
        if self._several_owners and own >= MAX_RUNNING - total:
            raise Overloaded(
                f"{own} responses of this API key are generated in the background already",
                hint="wait until some have ended; the other places are for other keys",
            )
        self._owners[owner] += 1

    def _release_place(self, owner: str) -> None:
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]

    def cancel(self, response_id: str) -> None:
        """Stop a response, if this process generates it. The store has its new state already."""
        run = self._running.pop(response_id, None)
        if run is not None:
            run.task.cancel()

    async def close(self, drain_s: float) -> None:
        """Wait for the responses at most `drain_s`, then let the remaining ones fail."""
        await wait_at_most(self._tasks.join(), drain_s)
        await self._tasks.close()

    async def _generate(self, turn: Turn, exchange: Exchange, log: EventLog) -> None:
        writer = turn.writer
        with self._generation.hold_story(exchange):
            try:
                await turn.generate(self._generation, exchange)
            except DynamoError as error:
                writer.fail(error)
            except asyncio.CancelledError:
                if writer.response["id"] in self._running:
                    writer.fail(
                        ServerStopped("the server stopped before the response was complete")
                    )
                else:
                    writer.cancel()
            except Exception:
                logger.exception("response failed")
                writer.fail(InternalError("internal error", hint="see the server's log"))
            self._running.pop(writer.response["id"], None)
            self._release_place(turn.owner)
            tail = writer.encode_last_event() if exchange.streaming else b""
            try:
                await self._store.finish(writer.response, log.take_batch(tail))
            except StoreUnavailable as error:
                logger.warning("response not stored", extra={"fields": {"error": error.message}})
            log.end(tail)

    async def _renew(self) -> None:
        """Renew the running responses until there are none."""
        await self._clock.sleep(RENEWAL_S)
        while running := tuple(self._running):
            logs = ((response_id, run.log) for response_id, run in self._running.items())
            events = [(key, batch) for key, log in logs if (batch := log.take_batch()) is not None]
            try:
                going_on = await self._store.renew(running, events)
            except StoreUnavailable as error:
                logger.warning("responses not renewed", extra={"fields": {"error": error.message}})
                for response_id, batch in events:
                    if (run := self._running.get(response_id)) is not None:
                        run.log.put_back(batch)
            else:
                for response_id in set(running) - going_on:
                    self.cancel(response_id)
            await self._clock.sleep(RENEWAL_S)
