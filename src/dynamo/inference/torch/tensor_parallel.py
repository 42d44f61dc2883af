"""Several devices share every layer: each rank has a part of the heads and of the MLP's columns.

Rank 0 is the runner of the worker. Each other rank is a process of its own, which computes the same
step on its weights and KV blocks; the ranks add up what attention and the MLP add. A rank that ends
ends the worker, since the others wait for it in the middle of a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import distributed
from torch.nn import functional

from dynamo.core.errors import DynamoError, ModelUnavailable
from dynamo.core.host.parent_death_signal import set_parent_death_signal
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.native.engine_sizing import available_memory_bytes, usable_cores
from dynamo.inference.torch.backend import GatedMlp, Linear, TorchBackend
from dynamo.inference.torch.batch import PagedBatch
from dynamo.inference.torch.device import TorchDevice
from dynamo.inference.torch.runner import TorchRunner
from dynamo.models.checkpoint.weights import ModelWeights

if TYPE_CHECKING:
    from dynamo.core.values import EngineInfo
    from dynamo.inference.model_runner import StepPlan, StepResult
    from dynamo.inference.native.kv_storage import KvShape
    from dynamo.models.checkpoint.decoder_config import DecoderConfig
    from dynamo.models.checkpoint.quantization import Floats, Stored

log = logging.getLogger(__name__)

RANK_PROGRAM = "from dynamo.inference.torch.tensor_parallel import serve_rank; serve_rank()"
_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


class RankPlan(NamedTuple):
    """The data that a rank needs to start. All ranks have the same, apart from `rank`."""

    open_weights: Callable[[], ModelWeights]
    settings: EngineSettings
    dtype: Any
    device_type: str
    context_tokens: int
    memory_bytes: int
    folder: str = ""
    rank: int = 0

    @property
    def device(self) -> TorchDevice:
        """The device of the rank: the card with its number, or the CPU."""
        name = "cpu" if self.device_type == "cpu" else f"{self.device_type}:{self.rank}"
        return TorchDevice(name, self.dtype)


class RankWeights(ModelWeights):
    """The part of a model's weights that one rank has."""

    def __init__(self, weights: ModelWeights, rank: int, size: int) -> None:
        self._weights, self._rank, self._size = weights, rank, size
        config = weights.config
        self.config = replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=config.num_kv_heads // size,
            intermediate_size=config.intermediate_size // size,
        )

    def has_tensor(self, name: str) -> bool:
        return name.split(".")[-2] in _ROWS or self._weights.has_tensor(name)

    def _read(self, name: str) -> Stored:
        tensor = self._weights.stored(name)
        *_, part, kind = name.split(".")
        if part in _COLUMNS and kind == "bias":
            return tensor if self._rank == 0 else np.zeros_like(tensor)
        if part in _ROWS or part in _COLUMNS:
            parts = np.split(tensor, self._size, axis=1 if part in _COLUMNS else 0)
            return np.ascontiguousarray(parts[self._rank])
        return tensor

    def rope_divisors(self, context_tokens: int = 0) -> Floats:
        return self._weights.rope_divisors(context_tokens)

    def close(self) -> None:
        self._weights.close()


class RankBackend(TorchBackend):
    """The operations of one rank. `followers`: the connections to the other ranks, which get each
    step; empty on these and while the model is loaded."""

    followers: Sequence[Connection] = ()

    def begin_step(self, batch: PagedBatch) -> None:
        if self.followers:
            values: list[Any] = list(batch)
            tensors = {n: each for n, each in enumerate(values) if isinstance(each, torch.Tensor)}
            shapes = {place: (each.shape, each.dtype) for place, each in tensors.items()}
            others = [None if n in tensors else each for n, each in enumerate(values)]
            message = pickle.dumps((shapes, others))
            for follower in self.followers:
                follower.send_bytes(message)
            for each in tensors.values():
                distributed.broadcast(each.contiguous(), 0)
        super().begin_step(batch)

    def receive_step(self, message: bytes) -> PagedBatch:
        """Return the step that rank 0 has sent, without the rows that are sampled there."""
        tensors, values = pickle.loads(message)  # noqa: S301 - from the worker of this rank
        for place, (shape, dtype) in tensors.items():
            values[place] = torch.empty(shape, dtype=dtype, device=self._device)
            distributed.broadcast(values[place], 0)
        batch = PagedBatch(*values)
        return batch._replace(sampled_rows=batch.sampled_rows[:0])

    def linear(self, rows: torch.Tensor, weight: Linear, name: str) -> torch.Tensor:
        out = super().linear(rows, weight, name)
        if name == "attention":
            distributed.all_reduce(out)
        return out

    def add_linear(self, total: torch.Tensor, rows: torch.Tensor, weight: Linear) -> None:
        part = functional.linear(rows, *weight)
        distributed.all_reduce(part)
        total += part

    def add_gated_mlp(self, total: torch.Tensor, rows: torch.Tensor, weights: GatedMlp) -> None:
        part = torch.zeros_like(total)
        super().add_gated_mlp(part, rows, weights)
        distributed.all_reduce(part)
        total += part


class TensorParallelRunner(TorchRunner):
    """Runs one model on several devices. Its blocks are in no region: a peer or a tier would have
    to copy those of every rank."""

    backend_class = RankBackend
    _backend: RankBackend

    def __init__(
        self,
        open_weights: Callable[[], ModelWeights],
        settings: EngineSettings,
        device: TorchDevice,
        *,
        context_tokens: int = 0,
        memory_bytes: int = 0,
        plan: RankPlan | None = None,
    ) -> None:
        self._size = size = settings.tensor_parallel_size
        if plan is None:
            on_cpu = device.name == "cpu"
            memory_bytes = (memory_bytes or available_memory_bytes()) // (size if on_cpu else 1)
            threads = settings.threads or max(1, usable_cores() // size)
            settings = replace(settings, threads=threads)
            plan = RankPlan(
                open_weights, settings, device.dtype, device.name, context_tokens, memory_bytes
            )
        self._plan, rank = plan, plan.rank
        super().__init__(
            lambda: RankWeights(open_weights(), rank, size),
            plan.settings,
            plan.device,
            context_tokens=plan.context_tokens,
            memory_bytes=plan.memory_bytes,
        )
        self._children: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        """To the other ranks, or, on one of these, to rank 0."""
        self._stops = False

    def _load_model(self) -> EngineInfo:
        self._plan = self._plan._replace(folder=tempfile.mkdtemp(prefix="dynamo-ranks-"))
        self._connections = [self._start_rank(rank) for rank in range(1, self._size)]
        try:
            self._join_ranks()
            info = super()._load_model()
            self._receive()
        except BaseException:
            self._stops = True
            raise
        self._backend.followers = self._connections
        return info

    def _receive(self) -> list[int]:
        """Return what each of the other ranks has sent. Raises `ModelUnavailable` for the error of
        one."""
        answers = [connection.recv() for connection in self._connections]
        for answer in answers:
            if isinstance(answer, str):
                raise ModelUnavailable(answer)
        return answers

    def _plan_engine(
        self, config: DecoderConfig, shape: KvShape, memory_bytes: int, kv_bytes: int = 0
    ) -> EngineInfo:
        """Return the sizes of the engine. All ranks have as many blocks as the one with the least
        room."""
        info = super()._plan_engine(config, shape, memory_bytes, kv_bytes)
        rank_0 = self._plan.rank == 0
        if not rank_0:
            self._connections[0].send(info.num_blocks)
        count = min(info.num_blocks, *self._receive())
        for connection in self._connections if rank_0 else ():
            connection.send(count)
        context = min(info.context_tokens, count * info.block_tokens)
        return replace(info, num_blocks=count, context_tokens=context)

    def _join_ranks(self) -> None:
        """Wait for all ranks."""
        on_cpu = self._device.type == "cpu"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not on_cpu:
            torch.cuda.set_device(self._device)  # of this thread
        distributed.init_process_group(
            "gloo" if on_cpu else "nccl",
            init_method=f"file://{self._plan.folder}/ranks",
            rank=self._plan.rank,
            world_size=self._size,
        )

    def _start_rank(self, rank: int) -> Connection:
        """Start the process of another rank. The kernel ends it with this thread."""
        mine, theirs = Pipe()
        command = [sys.executable, "-c", RANK_PROGRAM, str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603
        theirs.close()
        mine.send_bytes(pickle.dumps(self._plan._replace(rank=rank)))
        self._children.append(child)
        threading.Thread(target=self._watch, args=(rank, child), daemon=True).start()
        return mine

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        status = child.wait()
        if not self._stops:
            self._end_worker(f"rank {rank} ended with status {status}")

    def _end_worker(self, reason: str) -> None:
        """End this process, which is replaced. Its requests go on at other workers."""
        log.critical("the worker ends: %s", reason)
        shutil.rmtree(self._plan.folder, ignore_errors=True)
        os._exit(1)

    def _allocate_blocks(self, info: EngineInfo, shape: KvShape) -> torch.Tensor:
        return self._empty_blocks(info.num_blocks, shape)

    def _compute_step(self, plan: StepPlan) -> StepResult:
        try:
            return super()._compute_step(plan)
        except Exception as error:
            if self._stops:
                raise
            self._end_worker(f"a step failed: {error!r}")  # the others are in the middle of it
            raise

    async def stop(self) -> None:
        self._stops = True
        for connection in getattr(getattr(self, "_backend", None), "followers", ()):
            connection.close()
        await super().stop()
        for child in self._children:
            child.kill()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        shutil.rmtree(self._plan.folder, ignore_errors=True)

    def serve(self, connection: Connection) -> None:
        """Compute the steps that rank 0 sends, until it closes the connection."""
        self._join_ranks()
        self._connections = [connection]
        try:
            connection.send(super()._load_model().num_blocks)
        except DynamoError as error:  # rank 0 has the same one, or tells this one
            connection.send(f"rank {self._plan.rank}: {error}")
        with contextlib.suppress(EOFError):
            while True:
                self._model.forward(self._backend.receive_step(connection.recv_bytes()))


def serve_rank() -> None:
    """Run a rank other than 0: the program of its process."""
    set_parent_death_signal()
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker gets them, too, and stops the ranks
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        plan: RankPlan = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the worker
        TensorParallelRunner(plan.open_weights, plan.settings, plan.device, plan=plan).serve(
            connection
        )
