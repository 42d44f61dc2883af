"""The thread that owns a NIXL agent: all calls of the library happen there, none spins."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.communication.transfer.region import GENERATION_BYTES, MemoryRegion
from dynamo.core.clock import Backoff
from dynamo.core.errors import TransferFailed

# NIXL and UCX read these options from the environment alone, when they are loaded.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are exceptions; the rest is noise
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")  # regions outlive their registration
os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "256k")  # twice as fast as with UCX's default
os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "256k")

import nixl_cu12._bindings as nixl_errors
from nixl_cu12._api import nixl_agent, nixl_agent_config

HOST_TRANSPORTS: Final = "self,sm"
"""Shared memory and process_vm_readv, without TCP. UCX supports no handling of a dead peer's errors
over these; the plane's own connection notices the death."""
DEVICE_TRANSPORTS: Final = f"{HOST_TRANSPORTS},cuda"
"""The same between processes of which one has its slots on a card."""
MIN_PAUSE_S: Final = 0.0001
MAX_PAUSE_S: Final = 0.001
"""Pauses between two looks at transfers in flight, or at the requests of peers."""
ABORT_S: Final = 0.25
"""Time in which an aborted transfer may end by itself before its peer is disconnected."""

STAGES: Final = 16
STAGE_SLOTS: Final = 1024
"""Pulls of a peer that read generation numbers at the same time, and how many each."""

NIXL_ERRORS: Final = tuple(
    error for name, error in vars(nixl_errors).items() if name.endswith("Error")
)
Handle = Any
Agent = Any
"""`nixl_agent`, which has no types."""
Steps = Generator[None, None, None]
"""Work on the agent's thread. A `yield` lets other work and the network continue."""


_lifecycle = Lock()
"""Held while an agent is created or destroyed: UCX does not expect both at a time."""


class AgentThread:
    """Runs work on a NIXL agent in one thread, and answers the network while peers read from it."""

    def __init__(
        self, name: str, *, rdma: bool, host_only: bool = False, on_device: bool = False
    ) -> None:
        """Start the thread, which creates the agent. With `rdma` UCX may use network cards that
        read memory by themselves. With `host_only` all peers are on this host: UCX then opens no
        port, since its ports give memory to every user who reaches them. With `on_device` it reads
        and writes the memory of a card, too."""
        host_only = host_only and not rdma
        if not rdma:  # UCX reads its transports from the environment alone
            transports = DEVICE_TRANSPORTS if on_device else HOST_TRANSPORTS
            os.environ.setdefault("UCX_TLS", transports if host_only else "^ib")
        present = os.environ.get("UCX_TLS")  # of the first agent here
        in_memory = present in {HOST_TRANSPORTS, DEVICE_TRANSPORTS}
        self._options = {"ucx_error_handling_mode": "none"} if in_memory else {}
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[[Agent], Steps], Future[None]] | None]
        self._queue = SimpleQueue()
        self._readers = 0
        self._closed = False
        self._thread = Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[Agent], Steps]) -> Future[None]:
        """Run a generator to its end. The future raises what it raised."""
        future: Future[None] = Future()
        if self._closed:
            future.set_exception(TransferFailed.of("gone", "this process closed its NIXL agent"))
        else:
            self._queue.put((work, future))
        return future

    def count_readers(self, change: int) -> None:
        """Add to the number of pulls by peers. While it is not 0, the thread answers them."""
        self._readers = max(0, self._readers + change)
        self._queue.put(None)

    def close(self) -> None:
        """End the thread after the work in it, and with it the agent."""
        self._closed = True
        self._queue.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        agent: Agent = None
        running: list[tuple[Steps, Future[None]]] = []
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S)
        while running or not self._closed or not self._queue.empty():
            try:
                polls = running or self._readers
                job = self._queue.get(timeout=backoff.next_s() if polls else None)
                backoff.reset()
            except Empty:
                job = None
            if job is not None:
                work, future = job
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    agent = agent or _new_agent(self._name, self._options)
                    running.append((work(agent), future))
                except Exception as error:  # noqa: BLE001 - raised by the future
                    future.set_exception(error)
            if self._readers and agent is not None:
                agent.get_new_notifs()
            running = [step for step in running if _go_on(*step)]
        with _lifecycle:
            del agent


def _new_agent(name: str, options: dict[str, str]) -> Agent:
    with _lifecycle:
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", options)
        return agent


def _go_on(steps: Steps, future: Future[None]) -> bool:
    """Run the next step. False: the work has ended, and its future knows."""
    try:
        next(steps)
    except StopIteration:
        future.set_result(None)
        return False
    except Exception as error:  # noqa: BLE001 - raised by the future
        future.set_exception(error)
        return False
    return True


def descriptors(address: int, size: int, count: int, device: int = 0) -> NDArray[np.uint64]:
    """Describe `count` consecutive pieces of memory to NIXL: `[count, 3] uint64` of address, bytes
    and device."""
    table = np.empty((count, 3), np.uint64)
    table[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(size)
    table[:, 1] = size
    table[:, 2] = device
    return table


def read(
    agent: Agent,
    remote_agent: str,
    sides: tuple[Handle, Handle],
    ids: tuple[Sequence[int], Sequence[int]],
    stop: Event,
) -> Steps:
    """Read pieces of the remote side into the local one. `sides` and `ids` are (local, remote).

    Consecutive ids on both sides are one piece for the network. Ends early, but without a transfer
    in flight, when `stop` is set. Raises the errors of NIXL.
    """
    local, remote = (np.asarray(numbers, np.int32) for numbers in ids)
    handle = agent.make_prepped_xfer("READ", sides[0], local, sides[1], remote, b"")
    yield from finish_transfer(agent, remote_agent, handle, stop)


def finish_transfer(agent: Agent, remote_agent: str, handle: Handle, stop: Event) -> Steps:
    """Start a transfer and wait for its end; see `read`."""
    state = agent.transfer(handle)
    stopped_s = 0.0
    while state == "PROC":
        yield
        state = agent.check_xfer_state(handle)
        if stop.is_set() and state == "PROC":
            stopped_s = stopped_s or monotonic()
            if monotonic() - stopped_s > ABORT_S:
                agent.remove_remote_agent(remote_agent)
                raise nixl_errors.nixlCancelledError("the peer did not answer and is disconnected")
    agent.release_xfer_handle(handle)


class NixlMemory(msgspec.Struct, frozen=True):
    """The memory of a process, as a peer that has proven itself needs it."""

    agent: bytes
    slots_address: int
    generations_address: int
    memory_type: str = "DRAM"
    device: int = 0


class RegionAgent(AgentThread):
    """An agent that has registered the region of this process."""

    def __init__(self, name: str, region: MemoryRegion, *, rdma: bool, host_only: bool) -> None:
        on_device = region.memory_type == "VRAM"
        super().__init__(name, rdma=rdma, host_only=host_only, on_device=on_device)
        self.region = region
        self._stages = np.zeros(STAGES * STAGE_SLOTS, np.uint64)
        self.free_stages = list(range(STAGES))
        self.memory = NixlMemory(b"", 0, 0)
        self.own_lists: tuple[Handle, Handle] = (None, None)
        """Slots of the region, and stages for generation numbers of peers."""

    def register(self, agent: Agent) -> Steps:
        """Register the region and the stages, and prepare lists of them."""
        region, generations = self.region, self.region.generations_address
        kind, device = region.memory_type, region.device
        numbers = region.slots * GENERATION_BYTES
        stages = self._stages.ctypes.data
        _, slots = register_slots(agent, region)
        host = [(generations, numbers, 0, ""), (stages, self._stages.nbytes, 0, "")]
        agent.register_memory(host, "DRAM")
        own = descriptors(stages, GENERATION_BYTES, len(self._stages))
        self.own_lists = slots, agent.prep_xfer_dlist("", own, "DRAM")
        metadata = agent.get_agent_metadata()
        self.memory = NixlMemory(metadata, region.address, generations, kind, device)
        yield

    def staged(self, stage: int, count: int) -> Sequence[int]:
        """Return the generation numbers that were read into a stage."""
        numbers: list[int] = self._stages[stage * STAGE_SLOTS :][:count].tolist()
        return numbers


def register_slots(agent: Agent, region: MemoryRegion) -> tuple[Handle, Handle]:
    """Register the slots of a region. Returns the registration and a list of the slots."""
    count, kind, device = region.peer_slots, region.memory_type, region.device
    size = count * region.slot_bytes
    registration = agent.register_memory([(region.address, size, device, "")], kind)
    slots = descriptors(region.address, region.slot_bytes, count, device)
    try:
        return registration, agent.prep_xfer_dlist("", slots, kind)
    except NIXL_ERRORS:
        agent.deregister_memory(registration)
        raise
