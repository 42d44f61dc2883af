"""Responses that are generated without their client."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from dynamo.application.exchange import Exchange
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.responses.store import ResponseStore
from dynamo.application.responses.turn import Turn
from dynamo.communication.http import Response
from dynamo.core.clock import Clock
from dynamo.core.errors import (
    DynamoError,
    InternalError,
    Overloaded,
    ServerStopped,
    StoreUnavailable,
)
from dynamo.core.tasks import BackgroundTasks, wait_at_most

log = logging.getLogger(__name__)

MAX_RUNNING = 256
"""Responses in the background of a process. Each holds its input, which no client waits for.
With several API keys, the responses of one key take at most as many places as it leaves free."""
RENEWAL_S = 1.0
"""So often this process renews its responses, and looks which ones were cancelled elsewhere."""


class DetachedConnection:
    """The connection of a response without a client. Nothing is written to it."""

    chunked = False

    def __init__(self) -> None:
        self.output: list[bytes] = []
        self.pending_events: list[bytes] = []

    def schedule_flush(self) -> None:
        """Do nothing."""

    def merge_events(self) -> None:
        """Do nothing."""

    def unsent_bytes(self) -> int:
        """Return 0."""
        return 0


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
        self._running: dict[str, asyncio.Task[None]] = {}
        self._renewal: asyncio.Task[None] | None = None

    async def start(self, turn: Turn, exchange: Exchange) -> None:
        """Store the response and begin to generate it. Raises `StoreUnavailable`, `Overloaded`."""
        response = turn.writer.response
        self._take_place(turn.owner)
        try:
            await self._store.add(turn.owner, response, turn.items, running=True)
        except BaseException:
            self._release_place(turn.owner)
            raise
        exchange.request.release_body()
        detached = Exchange(
            exchange.request,
            Response(DetachedConnection(), "POST", "1.1", keep_alive=False, backlog_limit=1),
            exchange.request_id,
            exchange.client_request_id,
            (),
        )
        task = self._tasks.start(self._generate(turn, detached), response["id"])
        self._running[response["id"]] = task
        if self._renewal is None or self._renewal.done():
            self._renewal = self._tasks.start(self._renew(), "renew responses")

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
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()

    async def close(self, drain_s: float) -> None:
        """Wait for the responses at most `drain_s`, then let the remaining ones fail."""
        await wait_at_most(self._tasks.join(), drain_s)
        await self._tasks.close()

    async def _generate(self, turn: Turn, exchange: Exchange) -> None:
        writer = turn.writer
        try:
            await turn.generate(self._generation, exchange)
        except DynamoError as error:
            writer.fail(error)
        except asyncio.CancelledError:
            writer.fail(ServerStopped("the server stopped before the response was complete"))
        except Exception:
            log.exception("response failed")
            writer.fail(InternalError("internal error", hint="see the server's log"))
        self._running.pop(writer.response["id"], None)
        self._release_place(turn.owner)
        try:
            await self._store.finish(writer.response)
        except StoreUnavailable as error:
            log.warning("response not stored", extra={"fields": {"error": error.message}})

    async def _renew(self) -> None:
        """Renew the running responses until there are none."""
        await self._clock.sleep(RENEWAL_S)
        while running := tuple(self._running):
            try:
                going_on = await self._store.renew(running)
            except StoreUnavailable as error:
                log.warning("responses not renewed", extra={"fields": {"error": error.message}})
            else:
                for response_id in set(running) - going_on:
                    self.cancel(response_id)
            await self._clock.sleep(RENEWAL_S)
