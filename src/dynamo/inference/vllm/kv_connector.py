"""vLLM's NixlConnector: moves the KV of prompts between vLLM engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from dynamo.communication.addresses import advertised_host
from dynamo.core.errors import DECODE_ERRORS, ProtocolError, WorkerFailed
from dynamo.core.reply import KvConnector
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import Finish, GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.engines.event_reader import find_loopback_ports
from dynamo.inference.probe import DiscardedReply

if TYPE_CHECKING:
    from dynamo.core.context import Context
    from dynamo.core.reply import SendRequest
    from dynamo.core.settings import Settings

LEASE_S: Final = 30.0
CONNECTOR_CONFIG: Final[Mapping[str, Any]] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": int(LEASE_S)},
}
COMPUTE_FOR_ANOTHER: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters of a request whose KV another engine will load."""
FAILURES: Final = ("num_failed_transfers", "num_failed_handshakes")
"""Statistics of loads after which vLLM computes the prompt itself."""

encode_params = msgspec.msgpack.Encoder().encode
_decode_params = msgspec.msgpack.Decoder(dict[str, Any]).decode


def decode_params(kv: bytes) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_params` of a `GenerateRequest.kv`. Raises `ProtocolError`."""
    try:
        return _decode_params(kv)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"not the KV of a prompt of vLLM: {error}") from error


def loads_kv(kv: bytes) -> bool:
    """Whether a request with this `GenerateRequest.kv` loads KV of another engine. Raises
    `ProtocolError`."""
    return bool(kv) and bool(decode_params(kv).get("do_remote_prefill"))


class VllmKvConnector(KvConnector):
    """The NixlConnector of one engine. `generate` is that of the engine. `loads`: prompts whose KV
    this engine has loaded."""

    kind = "vllm-nixl"
    lease_s = LEASE_S

    def __init__(self, generate: SendRequest, tasks: BackgroundTasks) -> None:
        self._generate = generate
        self._tasks = tasks
        self._llm: Any = None
        self.failures: Counter[str] = Counter()
        self.loads = 0

    def on_started(self, llm: Any) -> None:
        """Take over the started AsyncLLM."""
        self._llm = llm

    async def prefill(self, request: GenerateRequest, context: Context) -> bytes:
        """Compute the prompt and one token, which nobody reads."""
        reply = _KvReply()
        once = replace(
            request,
            sampling=SamplingParams(temperature=0.0),
            stops=StopConditions(max_tokens=1, ignore_eos=True),
            top_logprobs=None,
            structured=None,
            extra={},
            kv=encode_params(COMPUTE_FOR_ANOTHER),
        )
        await self._generate(once, context, reply)
        if not reply.kv:
            raise WorkerFailed("vLLM computed a prompt and does not tell where its KV is")
        return reply.kv

    def release(self, kv: bytes) -> None:
        """Let vLLM tell the other engine. A version that cannot lets the lease end."""
        notify = getattr(self._llm, "notify_kv_transfer_request_rejected", None)
        if notify is not None:
            params = decode_params(kv)
            request_id = f"released-{params.get('remote_request_id')}"
            self._tasks.start(notify(request_id, params), "release of KV")

    def on_statistics(self, statistics: Mapping[str, Any] | None) -> None:
        """Count the loads of one step, and those that failed."""
        if not statistics:
            return
        self.loads += len(statistics.get("transfer_duration") or ())
        for name in FAILURES:
            if count := len(statistics.get(name) or ()):
                self.failures[f"vllm {name.removeprefix('num_failed_')}"] += count

    async def load(self, outputs: Any) -> AsyncIterator[Any]:
        """Yield the outputs of a request that loads KV. An abort before the first output may kill
        vLLM, so that a request which is cancelled earlier ends in the background."""
        first = self._tasks.start(_next_or_error(outputs), "load of KV")
        try:
            output = await asyncio.shield(first)
        except asyncio.CancelledError:
            self._tasks.start(_close_after(first, outputs), "end of a load of KV")
            raise
        async with aclosing(outputs):
            while output is not None:
                if isinstance(output, Exception):
                    raise output
                yield output
                output = await anext(outputs, None)


class _KvReply(DiscardedReply):
    """Keeps only the KV that the end of an answer names."""

    __slots__ = ("kv",)

    def __init__(self) -> None:
        self.kv = b""

    def finish(self, end: Finish) -> None:
        self.kv = end.kv


async def _next_or_error(outputs: Any) -> Any:
    """Return the next output, None at the end, or the exception that came instead."""
    try:
        return await anext(outputs, None)
    except Exception as error:  # noqa: BLE001 - is raised where the output is awaited
        return error


async def _close_after(first: asyncio.Task[Any], outputs: Any) -> None:
    await asyncio.wait((first,))
    await outputs.aclose()


def connector_environment(settings: Settings, ranks: int) -> dict[str, str]:
    """Return the variables that NixlConnector reads: address and first port of its ranks, and the
    order of the KV in memory."""
    runtime = settings.runtime
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": advertised_host(runtime.plane_host, runtime.public_host),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(find_loopback_ports(ranks)),
        "VLLM_KV_CACHE_LAYOUT": "HND",
    }
