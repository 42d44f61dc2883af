"""`PrefillEngine`, `KVCacheTransfer` and `DecodeEngine`: disaggregated serving as a library.

Each is a thin interface to what workers use. `PrefillEngine` computes a prompt and holds its
blocks. `KVCacheTransfer` pulls them over the transfer plane into the prefix cache of a
`DecodeEngine`, which continues the answer. The engines may be in different processes: a
`KvMetadata` is data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec.structs import replace

from dynamo.communication.transfer import RegionDescriptor, TransferPlane, open_transfer
from dynamo.core.clock import SystemClock
from dynamo.core.codec import pack_ids, unpack_ids
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, DynamoError, TransferFailed, Unsupported, WorkerFailed
from dynamo.core.hashing import root_identity
from dynamo.core.plugins import engine_needs_weights
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    SamplingParams,
    Started,
    StopConditions,
    read_field,
)
from dynamo.inference.disaggregation.peer_prefill import peer_block_tokens, plan_reads
from dynamo.inference.disaggregation.prefill_endpoint import compute_for_peer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.engine_registry import EngineInputs, open_engine
from dynamo.inference.kv_source import Arrival, FirstToken, KvSource, PrefillSink
from dynamo.inference.sequence import TokenContent

if TYPE_CHECKING:
    from dynamo.models.tokenization.tokenizer import Tokenizer

PEER = "peer"
"""The name of the other engine in requests. `KvMetadata` says where it is."""
_call_numbers = count(1)


class KvMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks of a sequence in the memory of an engine.

    `blocks` are slots of `region`, with the generations that they had. `first_token` follows
    `token_ids`, whose KV the blocks hold. `sampling` is continued by the decode engine.
    """

    token_ids: tuple[int, ...]
    region: RegionDescriptor
    blocks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    first_token: int | None = None
    sampling: SamplingParams = SamplingParams()
    request_id: str = ""


class PrefillResult(msgspec.Struct, frozen=True):
    """A computed prompt. Its blocks are held until `PrefillEngine.release`, or for some seconds."""

    kv_blocks: tuple[int, ...]
    transfer_metadata: KvMetadata
    sequence_length: int


class TransferResult(msgspec.Struct, frozen=True):
    """Blocks that have arrived, and the seconds that they took."""

    target_metadata: KvMetadata
    transfer_time: float


class DecodeResult(msgspec.Struct, frozen=True):
    """The tokens after the first one, with the one that ended the answer. `updated_kv_cache` names
    the blocks that the engine keeps. `cached_tokens` were not computed again."""

    generated_tokens: list[int]
    updated_kv_cache: KvMetadata
    cached_tokens: int


class LibraryEngine:
    """An engine that is opened at its first use. Use it as an async context manager, or `close` it.

    `model_config` is a model's path, or has `path` (or `name`) and settings of the engine such as
    `kind` and `num_blocks`, as attributes or keys; a `BatchedEngine` that has started also serves.
    `device_config` may have `tp_size` (1) and `transfer_plane`, a URL.
    """

    def __init__(self, model_config: Any = "", device_config: Any = None) -> None:
        tp_size = read_field(device_config, "tp_size", default=1)
        if tp_size != 1:
            raise Unsupported(
                f"tp_size {tp_size}: the engines of this version use one device",
                hint="leave out tp_size",
            )
        self._model_config = model_config
        self._transfer_url: str = read_field(device_config, "transfer_plane", default="auto")
        self._opening = asyncio.Lock()
        self._is_open = False
        self._tasks = BackgroundTasks()
        self._tokenizer: Tokenizer | None = None
        self.engine: BatchedEngine
        self.plane: TransferPlane
        self.region: RegionDescriptor

    async def start(self) -> None:
        """Open model, engine and transfer plane, unless that is done. Raises `ModelUnavailable`."""
        async with self._opening:
            if self._is_open:
                return
            config = self._model_config
            self.engine = config if isinstance(config, BatchedEngine) else await self._open_engine()
            region = self.engine.runner.region
            if region is None:
                raise Unsupported("this engine exposes no KV memory", hint="use native or mock")
            self.plane = await open_transfer(self._transfer_url, clock=SystemClock())
            self.region = await self.plane.expose(region, self.engine.runner.layout)
            self._is_open = True

    async def close(self) -> None:
        """Release the blocks and stop the engine, unless the caller has opened it."""
        await self._tasks.close()
        if not self._is_open:
            return
        await self.plane.close()
        if self.engine is not self._model_config:
            await self.engine.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def encode(self, request: Any) -> bytes:
        """Return the packed token ids of `input_ids`, or of `prompt`: ids or a text."""
        prompt = read_field(request, "input_ids", "prompt")
        if not isinstance(prompt, str):
            return pack_ids(prompt)
        if self._tokenizer is None:
            raise ConfigError(
                "the prompt is a text, and this engine was opened without a tokenizer",
                hint="pass input_ids, or a model's path as model_config",
            )
        return self._tokenizer.encode(prompt, add_special=True)

    async def _open_engine(self) -> BatchedEngine:
        from dynamo.models.resolve import resolve_model
        from dynamo.models.tokenization.tokenizer import load_tokenizer

        config = self._model_config
        if not isinstance(config, Mapping | str) and hasattr(config, "__fspath__"):
            config = str(config)
        path = config if isinstance(config, str) else read_field(config, "path", "name", default="")
        names = EngineSettings.__struct_fields__
        values = {name: value for name in names if (value := read_field(config, name)) is not None}
        settings = Settings(engine=EngineSettings(**{"kind": "native", **values}))
        kind = settings.engine.kind
        files = await resolve_model(str(path), with_weights=engine_needs_weights(kind))
        card = files.build_card(block_tokens=settings.engine.block_size)
        engine = await open_engine(kind, EngineInputs(settings, card, files, SystemClock()))
        if not isinstance(engine, BatchedEngine):
            raise Unsupported(f"engine {kind!r} has no KV memory", hint="use native or mock")
        await engine.start()
        self._tokenizer = await asyncio.to_thread(load_tokenizer, card.tokenizer_file)
        return engine


class PrefillEngine(LibraryEngine):
    """Computes prompts and holds their blocks for a `KVCacheTransfer`."""

    def __init__(self, model_config: Any = "", device_config: Any = None) -> None:
        super().__init__(model_config, device_config)
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def process_prefill_request(self, request: Any) -> PrefillResult:
        """Compute the prompt of `request`: `prompt` or `input_ids`, and `sampling_params`. Raises
        the errors of the engine."""
        await self.start()
        ids = self.encode(request)
        request_id = f"prefill-{next(_call_numbers)}"
        sampling = read_field(request, "sampling_params") or SamplingParams()
        call = GenerateRequest(request_id, "", ids, sampling, StopConditions(2), prefill=PEER)
        sink = _PromptSink()
        work = compute_for_peer(self.engine, call, Context(request_id), 0, sink)
        task = self._calls[request_id] = self._tasks.start(work, "prefill")
        task.add_done_callback(lambda _: self._calls.pop(request_id, None))
        await asyncio.wait((task, sink.first_token), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            raise WorkerFailed("the engine ended the prompt too early")
        metadata = KvMetadata(
            token_ids=tuple(unpack_ids(ids)),
            region=self.region,
            blocks=tuple(sink.blocks),
            generations=tuple(sink.generations),
            first_token=sink.first_token.result().token,
            sampling=sampling,
            request_id=request_id,
        )
        return PrefillResult(metadata.blocks, metadata, len(metadata.token_ids))

    async def release(self, metadata: KvMetadata) -> None:
        """Release the blocks of a prompt. A second call does nothing."""
        task = self._calls.get(metadata.request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))


class DecodeEngine(LibraryEngine):
    """Continues answers from blocks in its prefix cache."""

    async def start(self) -> None:
        await super().start()
        if not isinstance(self.engine.kv_source, PulledBlocks):
            self.engine.kv_source = PulledBlocks(self.plane)

    async def receive(self, metadata: KvMetadata) -> KvMetadata:
        """Pull the blocks of another engine into the prefix cache. Raises `TransferFailed`."""
        await self.start()
        source = self.engine.kv_source
        assert isinstance(source, PulledBlocks)  # noqa: S101 - `start` has set it
        request_id = f"transfer-{next(_call_numbers)}"
        source.expected[request_id] = metadata
        ids, stops = pack_ids(metadata.token_ids), StopConditions(1)
        request = GenerateRequest(request_id, "", ids, metadata.sampling, stops, prefill=PEER)
        try:
            await self.engine.generate(request, Context(request_id), _TokenList())
        finally:
            del source.expected[request_id]
        blocks = self._describe(metadata.token_ids, metadata.sampling)
        return replace(blocks, first_token=metadata.first_token)

    async def process_decode_request(self, request: Any, kv_metadata: KvMetadata) -> DecodeResult:
        """Generate the tokens after `last_token`, which by default is the first token of
        `kv_metadata`: at most `max_new_tokens`, until one of `stop_tokens`. Raises the errors of
        the engine."""
        await self.start()
        last = read_field(request, "last_token", default=kv_metadata.first_token)
        if last is None:
            raise ConfigError("the request has no last_token, and its metadata no first_token")
        tokens = (*kv_metadata.token_ids, last)
        stops = StopConditions(
            read_field(
                request, "max_new_tokens", "max_tokens", default=StopConditions().max_tokens
            ),
            stop_token_ids=tuple(read_field(request, "stop_tokens", default=())),
        )
        sampling = read_field(request, "sampling_params") or kv_metadata.sampling
        request_id = f"decode-{next(_call_numbers)}"
        ids = pack_ids(tokens)
        call = GenerateRequest(request_id, "", ids, sampling, stops, resumed=1)
        answer = _TokenList()
        await self.engine.generate(call, Context(request_id), answer)
        cached = self._describe((*tokens, *answer.ids), sampling)
        return DecodeResult(answer.ids, cached, answer.cached_tokens)

    def _describe(self, token_ids: Sequence[int], sampling: SamplingParams) -> KvMetadata:
        """Return the metadata of the blocks of a sequence that the prefix cache has."""
        region, pool = self.engine.runner.region, self.engine.scheduler.pool
        assert region is not None  # noqa: S101 - `start` has checked it
        content = TokenContent(pack_ids(token_ids), pool.block_tokens)
        if self.engine.tiers.can_load:  # as the engine's own sequences
            content.identity = root_identity()
        content.ensure_hashes(len(token_ids) // pool.block_tokens)
        blocks = pool.match(content.hashes, content.fingerprint)
        return KvMetadata(
            token_ids=tuple(token_ids),
            region=self.region,
            blocks=tuple(block.id for block in blocks),
            generations=tuple(region.generations[block.id] for block in blocks),
            sampling=sampling,
        )


class KVCacheTransfer:
    """Moves blocks between engines over the transfer plane of the target. `nixl_config` may say
    with `timeout` after how many seconds a transfer is given up."""

    def __init__(self, nixl_config: Any = None) -> None:
        self._timeout_s: float | None = read_field(nixl_config, "timeout")

    async def transfer_kv_cache(
        self, source_metadata: KvMetadata, target_worker: DecodeEngine
    ) -> TransferResult:
        """Pull the blocks and verify them. Raises `TransferFailed`, also if the layouts differ or
        the source holds the blocks no more."""
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                target = await target_worker.receive(source_metadata)
        except TimeoutError:
            text = f"the blocks did not arrive within {self._timeout_s:g} s"
            raise TransferFailed.of("timeout", text) from None
        return TransferResult(target, time.perf_counter() - started_s)


class PulledBlocks(KvSource):
    """Pulls the blocks that `expected` names for a request id."""

    def __init__(self, plane: TransferPlane) -> None:
        self._plane = plane
        self.expected: dict[str, KvMetadata] = {}

    async def fill(self, arrival: Arrival) -> None:
        metadata = self.expected.get(arrival.request.request_id)
        if metadata is None:
            return
        try:
            peer = await self._plane.connect(metadata.region)
            try:
                block_tokens = peer_block_tokens(peer, arrival)
                first = arrival.first_block * arrival.block_tokens // block_tokens
                sources = list(zip(metadata.blocks, metadata.generations, strict=True))[first:]
                if (first + len(sources)) * block_tokens < arrival.prompt_tokens:
                    text = f"{len(metadata.blocks)} blocks of {block_tokens} tokens are too few"
                    raise TransferFailed.of("refused", f"{text} for {arrival.prompt_tokens}")
                await peer.pull(plan_reads(sources, first, block_tokens, arrival))
            finally:
                await peer.close()
        except DynamoError as error:
            arrival.fail(error)
            return
        arrival.on_arrived(arrival.prompt_tokens)
        arrival.on_first_token(FirstToken(metadata.first_token or 0))


class _PromptSink(PrefillSink):
    """Collects the blocks and the first token of a prompt."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.generations: list[int] = []
        self.first_token: asyncio.Future[FirstToken] = asyncio.get_running_loop().create_future()

    def on_queued(self, tokens: int) -> None:
        del tokens

    def on_blocks(self, first: int, block_ids: Sequence[int], generations: Sequence[int]) -> bool:
        del first
        self.blocks += block_ids
        self.generations += generations
        return True

    def on_first_token(self, first: FirstToken) -> bool:
        self.first_token.set_result(first)
        return True


class _TokenList(Reply):
    """Collects the tokens of an answer, with the one that ended it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cached_tokens = 0

    def begin(self, started: Started) -> None:
        self.cached_tokens = started.cached_tokens

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        del logprobs
        self.ids += ids
        return True

    def finish(self, end: Finish) -> None:
        if end.stop_token is not None:
            self.ids.append(end.stop_token)
