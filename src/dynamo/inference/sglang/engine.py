"""`SglangEngine`: SGLang's Engine in this process, with its schedulers in others."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from random import getrandbits
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.core.errors import (
    DynamoError,
    InvalidRequest,
    Overloaded,
    WorkerFailed,
)
from dynamo.core.values import EngineInfo, Feature, GenerateRequest
from dynamo.inference.engines.arguments import engine_arguments
from dynamo.inference.engines.packages import argument_names
from dynamo.inference.engines.processes import EngineProcesses
from dynamo.inference.external import EngineKvView, KvEventEndpoint, find_loopback_ports
from dynamo.inference.external.engine import Computation, EngineAnswer, ExternalEngine
from dynamo.inference.external.engine_thread import EngineThread, ThreadStream
from dynamo.inference.external.startup import starting
from dynamo.inference.sglang.requests import (
    BootstrapRoom,
    decode_room,
    encode_room,
    forward_output,
    sampling_params,
)

if TYPE_CHECKING:
    from dynamo.inference.engine_registry import EngineInputs

CHECK_INTERVAL_S: Final = 0.2
MODES: Final = {"prefill": "prefill", "decode": "decode", "both": "null"}
STREAM_ARGUMENTS: Final = ("incremental_streaming_output", "stream_output")
"""Names, by version, of the argument that makes outputs hold new ids only."""
NO_RANK_EVENTS: Final = (
    "SGLang's data-parallel ranks publish under one address without "
    "--engine-arg enable_dp_attention=true"
)


class SglangEngine(ExternalEngine):
    """Runs SGLang's Engine in a thread: on the main thread it would replace the handlers of
    signals, and its start would block the event loop."""

    title = "SGLang"

    def __init__(self, inputs: EngineInputs) -> None:
        super().__init__(inputs)
        self._thread = EngineThread("sglang")
        self._llm: Any = None
        self._mode = MODES[inputs.settings.engine.role]

    async def open_engine(self) -> EngineInfo:
        arguments = engine_arguments(self.inputs.settings)
        self._mode = arguments.setdefault("disaggregation_mode", self._mode)
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
        return self._describe()

    def _open_views(self, arguments: dict[str, Any]) -> None:
        """Let SGLang publish its KV events on loopback, where each rank has a port."""
        count = arguments.get("dp_size", 1)
        port = find_loopback_ports(2 * count)
        endpoint = KvEventEndpoint(
            f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + count}", bind=True
        )
        arguments["kv_events_config"] = msgspec.json.encode(
            {
                "publisher": "zmq",
                "endpoint": endpoint.address,
                "replay_endpoint": endpoint.replay,
                "topic": "kv",
            }
        ).decode()
        views = [
            EngineKvView(self.inputs.card.block_tokens, endpoint=endpoint.of_rank(rank))
            for rank in range(count)
        ]
        self.set_ranks(views)
        for view in views:
            if count > 1 and not arguments.get("enable_dp_attention"):
                view.blocks.distrust(NO_RANK_EVENTS)
            else:
                view.open()

    def _describe(self) -> EngineInfo:
        server, manager, card = self._llm.server_args, self._llm.tokenizer_manager, self.inputs.card
        blocks = _scheduler_info(self._llm)["max_total_num_tokens"] // card.block_tokens
        for rank in self.ranks:
            rank.view.blocks.set_capacity(blocks)
        features: list[Feature] = ["logprobs", "logit_bias", "extra"]
        if not server.skip_tokenizer_init:
            features.append("structured")
        if getattr(server, "enable_lora", False):
            features.append("adapters")
        context_tokens = manager.model_config.context_len
        return EngineInfo(
            engine="sglang",
            block_tokens=card.block_tokens,
            num_blocks=blocks * len(self.ranks),
            context_tokens=context_tokens,
            max_num_seqs=(server.max_running_requests or 256) * len(self.ranks),
            max_num_batched_tokens=max(server.chunked_prefill_size or 0, 0) or context_tokens,
            vocab_size=card.vocab_size,
            data_parallel=len(self.ranks),
            prefix_caching=not server.disable_radix_cache,
            kv_events=not server.disable_radix_cache,
            features=tuple(features),
        )

    async def compute(self, computation: Computation, answer: EngineAnswer) -> None:
        request, _, ids, rank, number = computation
        rid = f"{request.request_id}/{number}"
        if self._mode == "prefill":
            self._prefill(request, ids, rank, rid, answer)
            return
        room = decode_room(request.kv) if request.kv else None
        if self._mode == "decode" and room is None:
            raise WorkerFailed("a decode engine of SGLang needs a prompt from a prefill worker")
        stream = self._stream(request, ids, rank, rid, room)
        ended = False
        try:
            while not ended:
                output = await _next_output(stream)
                new_tokens, goes_on = forward_output(output, answer, request.top_logprobs)
                ended = bool(output["meta_info"].get("finish_reason"))
                if new_tokens:
                    self.ranks[rank].on_tokens(number, new_tokens)
                if not goes_on:
                    return
        finally:
            if not ended:
                stream.abort()

    def _prefill(
        self, request: GenerateRequest, ids: list[int], rank: int, rid: str, answer: EngineAnswer
    ) -> None:
        """Let the prompt be computed, and answer at once with the room in which the decode engine
        meets it: both engines must have the request at the same time."""
        server = self._llm.server_args
        host = self.inputs.settings.runtime.public_host or self.inputs.settings.runtime.plane_host
        room = BootstrapRoom(host, server.disaggregation_bootstrap_port, getrandbits(63))
        stops = msgspec.structs.replace(request.stops, max_tokens=1)
        once = msgspec.structs.replace(request, stops=stops)
        self.tasks.start(_drain(self._stream(once, ids, rank, rid, room)), "prefill of SGLang")
        answer.finish("length", kv=encode_room(room))

    def _stream(
        self,
        request: GenerateRequest,
        ids: list[int],
        rank: int,
        rid: str,
        room: BootstrapRoom | None,
    ) -> ThreadStream:
        llm, server = self._llm, self._llm.server_args
        seeded = bool(getattr(server, "enable_deterministic_inference", False))
        options: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": sampling_params(request, self.max_tokens(request, len(ids)), seeded),
            "stream": True,
            "rid": rid,
        }
        if request.top_logprobs is not None:
            options |= {"return_logprob": True, "top_logprobs_num": request.top_logprobs}
        if request.salt:
            options["cache_salt"] = request.salt
        if request.adapter:
            options["lora_path"] = request.adapter
        if request.priority and getattr(server, "enable_priority_scheduling", False):
            options["priority"] = request.priority
        if len(self.ranks) > 1:
            options["routed_dp_rank"] = rank
        if room is not None:
            options |= {
                "bootstrap_host": room.host,
                "bootstrap_port": room.port,
                "bootstrap_room": room.room,
            }
        return self._thread.stream(
            lambda: llm.async_generate(**options), lambda: llm.tokenizer_manager.abort_request(rid)
        )

    async def empty_cache(self) -> None:
        done = await self._thread.run(self._llm.tokenizer_manager.flush_cache)
        if not getattr(done, "success", True):
            raise Overloaded("SGLang does not empty its prefix cache while requests use it")

    async def close_engine(self) -> None:
        with suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        llm, self._llm = self._llm, None
        await self._thread.close()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    async def _watch_processes(self) -> None:
        processes = _child_processes(self._llm)
        while all(map(_is_alive, processes)):  # noqa: ASYNC110
            await asyncio.sleep(CHECK_INTERVAL_S)
        self.fail("a process of SGLang has died")


def _start(path: Path, arguments: Mapping[str, Any], processes: EngineProcesses) -> Any:
    """Return a started Engine. Blocks until its schedulers have loaded the weights."""
    with starting("SGLang", "sglang", processes):
        return import_module("sglang").Engine(model_path=str(path), **arguments)


def _scheduler_info(llm: Any) -> Mapping[str, Any]:
    result: Any = getattr(llm, "_scheduler_init_result", None)
    info: Mapping[str, Any] = llm.scheduler_info if result is None else result.scheduler_infos[0]
    return info


def _child_processes(llm: Any) -> Sequence[int]:
    find = getattr(llm, "get_all_child_pids", None)
    return find() if find is not None else ()


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _next_output(stream: ThreadStream) -> Any:
    """Return the next output. Raises `InvalidRequest` or `WorkerFailed`."""
    try:
        return await stream.next()
    except DynamoError:
        raise
    except StopAsyncIteration:
        raise WorkerFailed("SGLang ended the answer without a reason") from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"SGLang refuses the request: {error}") from error
    except Exception as error:
        raise WorkerFailed(f"SGLang failed: {error!r}") from error


async def _drain(stream: ThreadStream) -> None:
    with suppress(StopAsyncIteration):
        while True:
            await stream.next()


async def open_engine(inputs: EngineInputs) -> SglangEngine:
    """Create the engine of the settings. SGLang is imported when it starts."""
    return SglangEngine(inputs)


open_engine.has_ranks = True  # type: ignore[attr-defined]
