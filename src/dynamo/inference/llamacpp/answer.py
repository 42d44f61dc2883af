"""Delivers the chunks of an answer of llama.cpp's server to a `Reply`."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo.core.errors import ContextLengthExceeded, DynamoError, InvalidRequest, WorkerFailed
from dynamo.core.reply import Reply
from dynamo.core.values import EngineTotals, FinishReason, GenerateRequest, TokenLogprobs
from dynamo.inference.engines.answer import ForeignAnswer
from dynamo.inference.llamacpp.slots import Slot


class ChunkReader:
    """Reads the chunks of one request into its `answer`. `slot` keeps the tokens that the server
    has computed for it."""

    def __init__(
        self,
        answer: ForeignAnswer,
        prompt: tuple[int, ...],
        slot: Slot,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._answer = answer
        self._prompt = prompt
        self._slot = slot
        self._top_logprobs = answer.request.top_logprobs
        stops = answer.request.stops
        self._stop_ids = frozenset(stops.stop_token_ids)
        if not stops.ignore_eos:
            self._stop_ids |= eos_token_ids
        self._held: dict[str, Any] | None = None

    def handle(self, chunk: dict[str, Any]) -> bool:
        """Deliver a chunk. False: the answer is complete, or the reply has enough. Raises the error
        that the chunk has."""
        if error := chunk.get("error"):
            raise map_error(error)
        if progress := chunk.get("prompt_progress"):
            self._on_progress(progress)
            return True
        choice = chunk["choices"][0]
        if reason := choice["finish_reason"]:
            self.finish("stop" if reason == "stop" else "length")
            return False
        for entry in (choice["logprobs"] or {}).get("content", ()):  # noqa: SIM110 - is faster
            if not self._on_token(entry):
                return False
        return True

    def finish(self, reason: FinishReason) -> None:
        """End the answer. A token that is held back is the stop token, or the last one."""
        held, self._held = self._held, None
        if reason == "stop":
            self._answer.finish("stop", held["id"] if held else None)
        elif held is None or self._send(held):
            self._answer.finish("length")

    def _on_progress(self, progress: dict[str, Any]) -> None:
        """Begin the answer with the first report: the server has then chosen what it reuses."""
        self._slot.tokens = list(self._prompt[: progress["processed"]])
        self._answer.begin(progress["cache"])
        self._answer.prefill_tokens = len(self._prompt) - progress["processed"]

    def _on_token(self, entry: dict[str, Any]) -> bool:
        """Deliver a token. A token without text is held back: it may be the end of the answer."""
        held, self._held = self._held, None
        if held is not None and not self._send(held):
            return False
        token = entry["id"]
        if token in self._stop_ids:
            self._answer.finish("stop", token)
            return False
        if not entry["bytes"]:
            self._held = entry
            return True
        return self._send(entry)

    def _send(self, entry: dict[str, Any]) -> bool:
        token = entry["id"]
        self._slot.tokens.append(token)
        if self._top_logprobs is None:
            return self._answer.send((token,))
        best = entry["top_logprobs"][: self._top_logprobs]
        top = tuple((other["id"], other["logprob"]) for other in best)
        return self._answer.send((token,), [TokenLogprobs(token, entry["logprob"], top)])


class SlotAnswer(ForeignAnswer):
    """An answer of the server in this process. `done` is set at its end.

    The server calls `on_chunk` in the request's thread. All else runs on the event loop.
    """

    def __init__(
        self,
        prompt: tuple[int, ...],
        slot: Slot,
        request: GenerateRequest,
        reply: Reply,
        eos_token_ids: frozenset[int],
        totals: EngineTotals,
    ) -> None:
        super().__init__(request, reply, totals)
        self._chunks = ChunkReader(self, prompt, slot, eos_token_ids)
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.stopped = False

    def on_chunk(self, chunk: dict[str, Any]) -> bool:
        """Pass a chunk to the event loop. True ends the request in the server."""
        if not self.stopped:
            self._loop.call_soon_threadsafe(self._deliver, chunk)
        return self.stopped

    def fail(self, error: DynamoError) -> None:
        """End the answer with `error`, if it has not ended."""
        self.stopped = True
        if not self.done.done():
            self.done.set_exception(error)

    def _deliver(self, chunk: dict[str, Any]) -> None:
        if self.done.done():
            return
        self._totals.steps += 1
        try:
            if self._chunks.handle(chunk):
                return
        except Exception as error:  # noqa: BLE001 - the awaited call raises it
            self.done.set_exception(error)
        else:
            self.done.set_result(None)
        self.stopped = True


def map_error(error: dict[str, Any]) -> DynamoError:
    """Return the error of the server as one of ours."""
    message = str(error.get("message", error))
    if error.get("type") == "exceed_context_size_error":
        return ContextLengthExceeded(message)
    if error.get("code") == 400:
        return InvalidRequest(f"llama.cpp refuses the request: {message}")
    return WorkerFailed(f"llama.cpp failed: {message}")
