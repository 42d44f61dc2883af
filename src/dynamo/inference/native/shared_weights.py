"""Prepared weights in sealed memory, which the workers of a deployment map read-only.

The first worker prepares the arrays in the memory, as the kernels read them. A manifest follows
them, and its length is at the end: whoever attaches reads no tensor. Mappings begin at a multiple
of a huge page, so that the kernel can give them huge pages. The memory has the form of a
`MemoryRegion`, whose generations are all 0: workers of other hosts can read it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import threading
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dynamo.communication.transfer.region import memory_offset
from dynamo.inference.native.blocked_matmul import BlockedMatrix
from dynamo.inference.native.buffers import ALIGNED_FLOATS, Arena
from dynamo.inference.native.decoder import DecoderLayer, DecoderWeights, prepare_weights
from dynamo.inference.native.gated_mlp import MlpShard
from dynamo.inference.native.weight_peers import SLOT_BYTES
from dynamo.models.checkpoint.safetensors import weight_files
from dynamo.models.file_cache import hash_file, stored_hash
from dynamo.runtime.shared_memory import SEALS, SharedMemoryClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo.inference.native.buffers import Floats
    from dynamo.inference.native.numpy_backend import NumpyBackend
    from dynamo.inference.native.weight_peers import WeightPeers
    from dynamo.inference.native.weights_digest import DigestedWeights

log = logging.getLogger(__name__)

LAYOUT_VERSION = 2
"""Counts changes of what the kernels read: memory of another version is not mapped."""
HUGE_PAGE_BYTES = 2 << 20
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MADV_COLLAPSE = 25
FLOAT_BYTES = 4
LENGTH_BYTES = 8
SPARE_BYTES = 64 << 20
LOW_PRIORITY = 10
"""The nice value of the thread that asks for huge pages. Steps wait for the page that it is at: on
a busy machine, a lower priority would hold them for seconds."""
PRELOADED: dict[str, int] = {}
"""Descriptors of weights that this process inherited, by `SharedWeights.content_key`."""
_NODES = {node.__name__: node for node in (DecoderWeights, DecoderLayer, BlockedMatrix, MlpShard)}


class _Manifest(msgspec.Struct, frozen=True):
    """The weights with `_Place`s instead of arrays, and the digest of the tensors."""

    digest: str
    weights: Any


class SharedWeights:
    """The weights of the model at `path`, in the memory of a supervisor. `peers` are processes of
    other supervisors."""

    def __init__(
        self, memory: SharedMemoryClient, path: Path, peers: WeightPeers | None = None
    ) -> None:
        self.peers = peers
        self._memory = memory
        self._path = path
        self._key = ""
        self._facts: Sequence[object] = ()
        self._mapped: Floats | None = None
        self._small_pages: Floats | None = None
        self._leaves = threading.Event()

    def load(
        self, weights: DigestedWeights, backend: NumpyBackend
    ) -> tuple[DecoderWeights | None, str]:
        """Return the weights and their digest; None and "" where the system cannot share memory.
        The rotary embedding of `weights` was read. Blocks while another worker prepares them."""
        self._facts = (
            LAYOUT_VERSION,
            weights.digest,  # of the configuration and the rotary embedding so far
            "float32",
            backend.thread_pool.threads,
            backend.small_kernels,
        )
        self._key = key = self._identify(_identify_files(self._path))
        try:
            fd = self._memory.open(key, lambda: self._provide(weights.copy(), backend))
        except OSError as error:
            fields = {"error": str(error)}
            log.warning("weights are not shared with other workers", extra={"fields": fields})
            return None, ""
        try:
            size = os.fstat(fd).st_size
            length = int.from_bytes(os.pread(fd, LENGTH_BYTES, size - LENGTH_BYTES), "little")
            data = os.pread(fd, length, size - LENGTH_BYTES - length)
            manifest = msgspec.msgpack.decode(data, type=_Manifest)
            self._mapped = self._small_pages = floats = _map_memory(fd, size, mmap.PROT_READ)
            if self.peers is not None:
                self.peers.hold(os.dup(fd), self.content_key)
        finally:
            os.close(fd)
        return _from_manifest(manifest.weights, floats), manifest.digest

    def content_key(self) -> str:
        """Return the identity of the loaded weights on every host. Hashes the model's files, if
        their hashes are not stored. Blocks."""
        files = _list_files(self._path)
        return self._identify([(file.name, stored_hash(file) or hash_file(file)) for file in files])

    def _identify(self, files: Sequence[object]) -> str:
        return hashlib.sha256(msgspec.json.encode((files, self._facts))).hexdigest()

    def _provide(self, weights: DigestedWeights, backend: NumpyBackend) -> int:
        """Return the descriptor of prepared weights: inherited, of a peer, or new ones."""
        if PRELOADED:
            if (fd := PRELOADED.get(self.content_key(), -1)) >= 0:
                return os.dup(fd)
            log.warning("the weights of the snapshot are of other files or settings")
        if self.peers is not None:
            fd = self.peers.fetch(self.content_key(), _limit_bytes(weights))
            if fd >= 0:
                return fd
        return _build(weights, backend)

    def start_huge_pages(self) -> None:
        """Let a thread ask the kernel for huge pages, with which a step of one row takes less time.
        Does nothing if another process did, or without kernel support."""
        if self._small_pages is not None:
            floats, self._small_pages = self._small_pages, None
            self._leaves = leaves = threading.Event()
            threading.Thread(
                target=_collapse, args=(floats, leaves), name="huge-pages", daemon=True
            ).start()

    def leave(self, *, comes_back: bool) -> None:
        """Take the memory out of this process. If it `comes_back`, the weights stay mapped: each
        page returns with its first use. Else the weights may not be used any more, and the memory
        is given back when no other process has it."""
        mapped = self._mapped
        if mapped is None:
            return
        self._leaves.set()
        self._small_pages = mapped if comes_back else None
        _madvise(mapped.ctypes.data, mapped.nbytes, mmap.MADV_DONTNEED)
        if not comes_back:
            self._mapped = None
            self._memory.release(self._key)
            if self.peers is not None:
                self.peers.release()


class PreloadedMemory(SharedMemoryClient):
    """Keeps the descriptor of weights in this process, which has no supervisor yet."""

    def __init__(self) -> None:
        self.fd = -1

    def open(self, key: str, build: Callable[[], int]) -> int:
        del key
        self.fd = build()
        return os.dup(self.fd)


def shared_weights(
    memory: SharedMemoryClient | None, path: Path, peers: WeightPeers | None = None
) -> SharedWeights | None:
    """Return the weights of a process with shared memory; None without."""
    return None if memory is None else SharedWeights(memory, path, peers)


class _SharedArena(Arena):
    """Allocates arrays in new memory of at most `limit_bytes`, of which unused pages cost nothing.
    Raises `OSError` where the system has no such memory."""

    def __init__(self, limit_bytes: int) -> None:
        self.fd = os.memfd_create("dynamo-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._header_bytes = memory_offset(-(-limit_bytes // SLOT_BYTES))
        size = self._header_bytes + limit_bytes
        os.ftruncate(self.fd, size)
        self._floats = _map_memory(self.fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
        self._used = self._header_bytes // FLOAT_BYTES

    def __call__(self, *shape: int) -> Floats:
        start, size = self._used, prod(shape)
        self._used += -(-size // ALIGNED_FLOATS) * ALIGNED_FLOATS
        if self._used > self._floats.size:
            raise MemoryError("the prepared weights are larger than planned")
        return self._floats[start : start + size].reshape(shape)

    def place(self, array: Floats) -> int:
        """Return the index of the array's first number in the memory. An array that lies elsewhere
        is copied."""
        if not np.may_share_memory(array, self._floats):
            copy = self(*array.shape)
            copy[:] = array
            array = copy
        return (array.ctypes.data - self._floats.ctypes.data) // FLOAT_BYTES

    def finish(self, manifest: bytes) -> None:
        """Add the manifest. No array of this arena may be in use any more."""
        data = manifest + len(manifest).to_bytes(LENGTH_BYTES, "little")
        slots = -(-(self._used * FLOAT_BYTES - self._header_bytes + len(data)) // SLOT_BYTES)
        while memory_offset(slots) < self._header_bytes:
            slots += 1
        end = self._header_bytes + slots * SLOT_BYTES
        del self._floats
        os.ftruncate(self.fd, end)
        os.pwrite(self.fd, data, end - len(data))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)


def _limit_bytes(weights: DigestedWeights) -> int:
    return 2 * FLOAT_BYTES * weights.config.count_weights() + SPARE_BYTES


def _build(weights: DigestedWeights, backend: NumpyBackend) -> int:
    """Prepare the weights in new memory, and return its descriptor."""
    arena = _SharedArena(_limit_bytes(weights))
    private, backend.arena = backend.arena, arena
    try:
        plain = _to_manifest(prepare_weights(weights, backend), arena.place)
        backend.arena = private
        arena.finish(msgspec.msgpack.encode(_Manifest(weights.digest, plain)))
    except BaseException:
        os.close(arena.fd)
        raise
    finally:
        backend.arena = private
    return arena.fd


def _to_manifest(value: Any, place: Callable[[Floats], int]) -> Any:
    if isinstance(value, np.ndarray):
        return {"start": place(value), "shape": value.shape}
    if isinstance(value, msgspec.Struct):
        fields = (getattr(value, name) for name in value.__struct_fields__)
        return {"node": type(value).__name__, "fields": [_to_manifest(f, place) for f in fields]}
    return [_to_manifest(part, place) for part in value] if isinstance(value, tuple) else value


def _from_manifest(plain: Any, floats: Floats) -> Any:
    if isinstance(plain, list):
        return tuple(_from_manifest(part, floats) for part in plain)
    if not isinstance(plain, dict):
        return plain
    if "node" in plain:
        return _NODES[plain["node"]](*_from_manifest(plain["fields"], floats))
    start, shape = plain["start"], plain["shape"]
    return floats[start : start + prod(shape)].reshape(shape)


def _identify_files(path: Path) -> list[tuple[str, int, int, int, int, int]]:
    """Return what changes when a file of the model changes. A hash of the content would cost more
    than attaching; nobody can set the time of a change (ctime)."""
    stats = [(file, file.stat()) for file in _list_files(path)]
    return [
        (file.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file, stat in stats
    ]


def _list_files(path: Path) -> Sequence[Path]:
    return [path] if path.is_file() else [path / "config.json", *weight_files(path)]


def _map_memory(fd: int, size: int, protection: int) -> Floats:
    """Map a memfd at a multiple of a huge page, as one array. The memory is unmapped with the last
    array over it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    space = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
    address = ctypes.addressof(ctypes.c_char.from_buffer(space))
    skip = -address % HUGE_PAGE_BYTES
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = library.mmap(address + skip, size, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    if at != address + skip:
        raise OSError(ctypes.get_errno(), "memory for weights cannot be mapped")
    floats = np.frombuffer(space, np.float32, size // FLOAT_BYTES, skip)
    floats.flags.writeable = bool(protection & mmap.PROT_WRITE)
    return floats


def _collapse(floats: Floats, leaves: threading.Event) -> None:
    """Ask for huge pages, one at a time, since a step may wait for a call. Ends when the memory
    `leaves` the process."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
    for start in range(0, floats.nbytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        if leaves.is_set():
            return
        _madvise(floats.ctypes.data + start, HUGE_PAGE_BYTES, MADV_COLLAPSE)


def _madvise(address: int, size: int, advice: int) -> None:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.madvise(address, size, advice)
