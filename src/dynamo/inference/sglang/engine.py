"""`SglangEngine`: SGLang's Engine in this process, with its schedulers in others."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from dynamo.core.errors import Overloaded
from dynamo.core.host.pids import start_ticks
from dynamo.core.values import EngineInfo, Feature
from dynamo.inference.engines.arguments import engine_arguments
from dynamo.inference.engines.engine import NEUTRAL_SAMPLING, Computation, MultiprocessEngine
from dynamo.inference.engines.event_reader import choose_loopback_endpoint
from dynamo.inference.engines.packages import argument_names
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.engines.startup import starting
from dynamo.inference.sglang.requests import forward_output, sampling_params
from dynamo.runtime.background import ThreadBackground

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs


T = TypeVar("T")
JOIN_TIMEOUT_S = 7.0
"""Time for a thread to end, with the time for its tasks."""


class EngineThread:
    """The thread lives from the first call until `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._background: ThreadBackground | None = None

    async def run(self, call: Callable[[], T | Awaitable[T]]) -> T:
        """Run `call` in the thread, await its result there and return it."""

        async def run() -> T:
            result = call()
            return await result if isinstance(result, Awaitable) else result

        return await self._open().run(run())

    def call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the thread, after everything that was started before."""
        if self._background is not None:
            self._background.call_soon(call)

    def stream(
        self, start: Callable[[], Awaitable[AsyncIterator[Any]]], abort: Callable[[], object]
    ) -> ThreadStream:
        """Iterate in the thread over what `start` returns. `abort` ends it early there."""
        stream = ThreadStream(self, abort)
        self._open().submit(stream.pump(start))
        return stream

    async def close(self) -> None:
        """Cancel all streams and end the thread. A thread that the engine blocks is left alone."""
        background, self._background = self._background, None
        if background is not None:
            await background.close(JOIN_TIMEOUT_S)

    def _open(self) -> ThreadBackground:
        if self._background is None:
            self._background = ThreadBackground(self._name)
        return self._background


class ThreadStream:
    """The items of an iterator in an `EngineThread`, for one task of the event loop."""

    def __init__(self, thread: EngineThread, abort: Callable[[], object]) -> None:
        self._thread = thread
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._aborted = False

    async def pump(self, start: Callable[[], Awaitable[AsyncIterator[Any]]]) -> None:
        """Pass the items on. Runs in the thread."""
        try:
            iterator = await start()
            async with aclosing(iterator):  # type: ignore[type-var]
                async for item in iterator:
                    self._put((item, None))
                    if self._aborted:  # before, the engine may not have known the request
                        self._abort()
                        break
            self._put((None, StopAsyncIteration()))
        except Exception as error:  # noqa: BLE001 - is raised by `__anext__`
            self._put((None, error))

    def __aiter__(self) -> ThreadStream:
        return self

    async def __anext__(self) -> Any:
        """Return the next item. Raises the engine's error."""
        item, error = await self._items.get()
        if error is not None:
            raise error
        return item

    def abort(self) -> None:
        """End the iteration early. Returns at once; the engine may continue for a step."""
        self._aborted = True
        self._thread.call_soon(self._abort)

    def _put(self, entry: tuple[Any, Exception | None]) -> None:
        self._loop.call_soon_threadsafe(self._items.put_nowait, entry)


CHECK_INTERVAL_S: Final = 0.2
DEFAULT_MAX_NUM_SEQS: Final = 256
STREAM_ARGUMENTS: Final = ("incremental_streaming_output", "stream_output")
"""Names, by version, of the argument that makes outputs hold new ids only."""
NO_RANK_EVENTS: Final = (
    "SGLang's data-parallel ranks publish under one address without "
    "--engine-arg enable_dp_attention=true"
)


class SglangEngine(MultiprocessEngine):
    """Runs SGLang's Engine in a thread: on the main thread it would replace the handlers of
    signals, and its start would block the event loop."""

    title = "SGLang"
    refusals = (ValueError, TypeError)
    forward = staticmethod(forward_output)

    def __init__(self, inputs: EngineInputs) -> None:
        super().__init__(inputs)
        self._thread = EngineThread("sglang")
        self._effective: Mapping[str, Any] = {}

    async def open_engine(self) -> EngineInfo:
        arguments = engine_arguments(self.inputs.settings)
        arguments.setdefault("page_size", self.inputs.card.block_tokens)
        known = argument_names("sglang")
        arguments |= {name: True for name in STREAM_ARGUMENTS if name in known}
        self._open_views(arguments)
        with suppress(RuntimeError, ValueError):  # not on the main thread
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGQUIT, self.fail, "a process of SGLang has died"
            )
        path = self.inputs.files.path
        self._llm = await self._thread.run(lambda: _start(path, arguments, self.processes))
        self.tasks.start(self._watch_processes(), "processes of SGLang")
        self._effective = effective_arguments(self._llm.server_args)
        (state, *_) = await self._thread.run(self._llm.tokenizer_manager.get_internal_state)
        return self._describe(state)

    def _open_views(self, arguments: dict[str, Any]) -> None:
        """Let SGLang publish its KV events on loopback, where each rank has a port."""
        of_attention = arguments.get("attn_dp_size", 1)
        count = max(arguments.get("dp_size", 1), of_attention)
        endpoint = choose_loopback_endpoint(count)
        config = msgspec.json.encode(endpoint.publisher_config()).decode()
        arguments["kv_events_config"] = config
        self.set_ranks(count, endpoint)
        for rank in self.ranks:
            if count > max(1, of_attention) and not arguments.get("enable_dp_attention"):
                rank.blocks.distrust(NO_RANK_EVENTS)
            else:
                rank.open()

    def _describe(self, state: Mapping[str, Any]) -> EngineInfo:
        """Return the limits in effect. `state`: what the first scheduler says of itself."""
        effective, card = self._effective, self.inputs.card
        blocks = _scheduler_info(self._llm)["max_total_num_tokens"] // card.block_tokens
        for rank in self.ranks:
            rank.blocks.set_capacity(blocks)
        features: list[Feature] = ["logprobs", "logit_bias", "extra"]
        if not effective["skip_tokenizer_init"]:
            features.append("structured")
        if effective.get("enable_lora"):
            features.append("adapters")
        model = self._llm.tokenizer_manager.model_config
        context_tokens, caches = model.context_len, not effective["disable_radix_cache"]
        max_num_seqs = state.get("effective_max_running_requests_per_dp")
        return EngineInfo(
            engine="sglang",
            block_tokens=card.block_tokens,
            num_blocks=blocks * len(self.ranks),
            context_tokens=context_tokens,
            max_num_seqs=(max_num_seqs or DEFAULT_MAX_NUM_SEQS) * len(self.ranks),
            max_num_batched_tokens=max(effective["chunked_prefill_size"] or 0, 0) or context_tokens,
            vocab_size=card.vocab_size,
            data_parallel=len(self.ranks),
            prefix_caching=caches,
            kv_events=caches,
            features=tuple(features),
            sampling={**NEUTRAL_SAMPLING, **model.get_default_sampling_params()},
        )

    def open_stream(self, computation: Computation) -> ThreadStream:
        llm, effective = self._llm, self._effective
        request, _, ids, rank, number = computation
        rid = f"{request.request_id}/{number}"
        seeded = bool(effective.get("enable_deterministic_inference"))
        options: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": sampling_params(request, seeded=seeded),
            "stream": True,
            "rid": rid,
        }
        if request.top_logprobs is not None:
            options |= {"return_logprob": True, "top_logprobs_num": request.top_logprobs}
        if request.salt:
            options["cache_salt"] = request.salt
        if request.adapter:
            options["lora_path"] = request.adapter
        if request.priority and effective.get("enable_priority_scheduling"):
            options["priority"] = request.priority
        if len(self.ranks) > 1:
            options["routed_dp_rank"] = rank
        return self._thread.stream(
            lambda: llm.async_generate(**options), lambda: llm.tokenizer_manager.abort_request(rid)
        )

    async def close_stream(self, stream: ThreadStream, *, ended: bool) -> None:
        if not ended:
            stream.abort()

    async def empty_cache(self) -> None:
        done = await self._thread.run(self._llm.tokenizer_manager.flush_cache)
        if not getattr(done, "success", True):
            raise Overloaded("SGLang does not empty its prefix cache while requests use it")

    async def close_engine(self) -> None:
        with suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        await self._thread.close()
        await super().close_engine()

    async def _watch_processes(self) -> None:
        processes = _child_processes(self._llm)
        while all(map(start_ticks, processes)):  # noqa: ASYNC110
            await asyncio.sleep(CHECK_INTERVAL_S)
        self.fail("a process of SGLang has died")


def _start(path: Path, arguments: Mapping[str, Any], processes: EngineProcesses) -> Any:
    """Return a started Engine. Blocks until its schedulers have loaded the weights."""
    with starting("SGLang", "sglang", processes):
        return import_module("sglang").Engine(model_path=str(path), **arguments)


def effective_arguments(server_args: Any) -> Mapping[str, Any]:
    """Return the arguments in effect. Since 0.5.23 the attributes of `server_args` are what the
    caller has given, where older versions replace them."""
    resolve = getattr(server_args, "resolved_dict", None)
    arguments: Mapping[str, Any] = vars(server_args) if resolve is None else resolve()
    return arguments


def _scheduler_info(llm: Any) -> Mapping[str, Any]:
    result: Any = getattr(llm, "_scheduler_init_result", None)
    info: Mapping[str, Any] = llm.scheduler_info if result is None else result.scheduler_infos[0]
    return info


def _child_processes(llm: Any) -> Sequence[int]:
    find = getattr(llm, "get_all_child_pids", None)
    return find() if find is not None else ()
