"""The routes of /v1/responses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from typing import Any
from urllib.parse import parse_qs

import msgspec

from dynamo.application.access import ApiKeys
from dynamo.application.exchange import Exchange
from dynamo.application.gateway import Gateway
from dynamo.application.generation.handler import GenerationHandler
from dynamo.application.responses.body import chat_parts, read_conversation, read_responses_body
from dynamo.application.responses.event_log import EventLog, replay
from dynamo.application.responses.input_items import Item, read_input
from dynamo.application.responses.store import ResponseStore
from dynamo.application.responses.turn import Turn
from dynamo.application.responses.writer import ResponseItemWriter, new_response
from dynamo.application.routes import Route
from dynamo.core.clock import Clock
from dynamo.core.errors import (
    DynamoError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerStopped,
    StoreUnavailable,
    Unsupported,
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


PREFIX = "/v1/responses/"
MAX_PAGE = 100
DEFAULT_PAGE = 20
MAX_DIGITS = 9


class ResponsesHandler:
    """Answers requests of the Responses API. Responses belong to the API key that made them."""

    def __init__(
        self,
        gateway: Gateway,
        generation: GenerationHandler,
        store: ResponseStore,
        keys: ApiKeys,
        clock: Clock,
    ) -> None:
        self._gateway = gateway
        self._generation = generation
        self._store = store
        self._owner = keys.owner
        self._clock = clock
        self._background = BackgroundResponses(
            generation, store, clock, several_owners=keys.are_several
        )

    def routes(self) -> dict[str, dict[str, Route]]:
        """Return the routes by path and method."""
        return {
            "/v1/responses": {"POST": self.create},
            "/v1/responses/input_tokens": {"POST": self.count_input_tokens},
            "/v1/responses/compact": {"POST": self.refuse_compaction},
            "/v1/responses/": {"GET": self.read, "DELETE": self.delete, "POST": self.cancel},
        }

    async def close(self, drain_s: float) -> None:
        """Wait for responses in the background at most `drain_s`, then close the store."""
        await self._background.close(drain_s)
        await self._store.close()

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        turn = await self._read_turn(exchange, streams=True)
        if not turn.writer.response["background"]:
            await turn.answer(self._generation, exchange, self._store)
            return
        with turn.chat.names:  # raise what is wrong with the fields at once
            self._generation.read_chat_request(exchange, turn.chat)
        await self._background.answer(turn, exchange)

    async def count_input_tokens(self, exchange: Exchange) -> None:
        """POST /v1/responses/input_tokens."""
        turn = await self._read_turn(exchange, streams=False)
        with turn.chat.names:
            tokens = await self._generation.count_tokens(exchange, turn.chat)
        exchange.send_value({"object": "response.input_tokens", "input_tokens": tokens})

    async def refuse_compaction(self, exchange: Exchange) -> None:
        """POST /v1/responses/compact."""
        del exchange
        raise Unsupported(
            "responses cannot be compacted", hint="begin a new conversation with a summary"
        )

    async def read(self, exchange: Exchange) -> None:
        """GET /v1/responses/ID and /v1/responses/ID/input_items."""
        request = exchange.request
        response_id, _, part = request.path.removeprefix(PREFIX).partition("/")
        query = {name: values[-1] for name, values in parse_qs(request.query).items()}
        answer: Item
        if part == "input_items":
            arguments = _read_page_query(query)
            page = await self._store.load_page(self._owner(request), response_id, **arguments)
            answer = {
                "object": "list",
                "data": page.items,
                "first_id": page.ids[0] if page.ids else None,
                "last_id": page.ids[-1] if page.ids else None,
                "has_more": page.has_more,
            }
        elif part:
            raise NotFound(
                f"there is no GET {request.path[:100]}", hint="did you mean input_items?"
            )
        elif query.get("stream", "false").lower() not in {"false", "0"}:
            after = -1
            if "starting_after" in query:
                after = _read_starting_after(query["starting_after"])
            owner = self._owner(request)
            await replay(self._store, self._clock, exchange, owner, response_id, after)
            return
        else:
            answer = await self._store.get(self._owner(request), response_id)
        exchange.send_value(answer)

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /v1/responses/ID."""
        response_id = exchange.request.path.removeprefix(PREFIX)
        await self._store.delete(self._owner(exchange.request), response_id)
        self._background.cancel(response_id)
        answer = {"id": response_id, "object": "response", "deleted": True}
        exchange.send_value(answer)

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/responses/ID/cancel."""
        path = exchange.request.path
        response_id, _, action = path.removeprefix(PREFIX).partition("/")
        if action != "cancel":
            raise NotFound(
                f"there is no POST {path[:100]}", hint=f"did you mean {PREFIX}ID/cancel?"
            )
        response = await self._store.cancel(self._owner(exchange.request), response_id)
        self._background.cancel(response_id)
        exchange.send_value(response)

    async def _read_turn(self, exchange: Exchange, *, streams: bool) -> Turn:
        body = read_responses_body(exchange.request)
        exchange.streaming = streams and bool(body.stream)
        model, served = self._gateway.find(body.model)
        owner = self._owner(exchange.request)
        key = os.urandom(24).hex()
        text = isinstance(body.input, str)
        items = read_input(body.input or "", key)
        if not text:
            items = await self._resolve_references(owner, items)
        context: list[Item] = []
        if body.previous_response_id:
            context = await self._store.load_context(owner, body.previous_response_id)
        if exchange.request.is_large:
            await exchange.request.pause()
        conversation = read_conversation(body.instructions, context, items, text=text)
        if exchange.request.is_large:
            await exchange.request.pause()
        response = new_response(
            body, f"resp_{key}", model, int(self._clock.wall()), served.sampling
        )
        writer = ResponseItemWriter(response, self._clock.wall)
        return Turn(owner, items, chat_parts(body, conversation), writer)

    async def _resolve_references(self, owner: str, items: list[Item]) -> list[Item]:
        """Replace references by the items of stored responses. Raises `NotFound`."""
        references = [item["id"] for item in items if item["type"] == "item_reference"]
        wanted = set(references)
        if not wanted:
            return items
        if len(wanted) < len(references):
            raise InvalidRequest("an item is referenced more than once", field="input")
        stored = await self._store.find_items(owner, wanted)
        for number, item in enumerate(items):
            if item["type"] == "item_reference" and item["id"] not in stored:
                raise NotFound(
                    f"there is no stored item {item['id'][:100]!r}",
                    hint="send the item itself; store: false keeps none",
                    field=f"input[{number}].id",
                )
        return [stored.get(item["id"], item) for item in items]


def _read_starting_after(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        raise InvalidRequest("expected the number of an event", field="starting_after")
    return int(text)


def _read_page_query(query: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of a page of items, the last ones first unless `order=asc`."""
    order, limit_text = query.get("order", "desc"), query.get("limit", str(DEFAULT_PAGE))
    if order not in {"asc", "desc"}:
        raise InvalidRequest("expected asc or desc", field="order")
    digits = limit_text if len(limit_text) <= len(str(MAX_PAGE)) else ""
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= MAX_PAGE:
        raise InvalidRequest(f"expected 1 to {MAX_PAGE}", field="limit")
    return {"ascending": order == "asc", "limit": int(digits), "after": query.get("after")}
