"""Reader of GGUF files. Metadata and tensors are decoded on demand from a memory map.

Source: the GGUF specification, versions 2 and 3, little-endian. Every size and offset is checked
before use, so a damaged file always raises `ModelUnavailable`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from math import prod
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dynamo.core.errors import ModelUnavailable
from dynamo.models.checkpoint.quantization import block_layout, copy_floats, read_values

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats, Stored

T = TypeVar("T")
MAGIC = b"GGUF"
_U32, _U64 = Struct("<I"), Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: Struct("<" + letter)
    for code, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
MAX_DIMENSIONS = 8
"""The largest number of dimensions of a tensor in a file."""
_MAX_NESTING = 4
_MAX_ENTRIES = 1 << 24
"""The largest number of metadata values, array elements and tensors together."""
_PARSE_ERRORS = (struct.error, UnicodeDecodeError, OverflowError)


class TensorInfo(NamedTuple):
    """Place of a tensor. `shape` has NumPy's order; `start` is its offset in the file. `kind` may
    be a type that only other readers know."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile(AbstractContextManager["GgufFile"]):
    """A memory-mapped GGUF file. Metadata values are decoded on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self._size_bytes = len(self._map)
        self._value_readers: dict[str, Callable[[], Any]] = {}
        self._entries = 0
        try:
            self._read_header()
        except _PARSE_ERRORS as error:
            raise self._damaged_error(str(error)) from error

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file, as soon as no array in it is left."""
        close_map(self._map)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value (arrays as lists), or `default`."""
        read = self._value_readers.get(key)
        if read is None:
            return default
        try:
            return read()
        except (*_PARSE_ERRORS, MemoryError) as error:
            raise self._damaged_error(f"{key}: {error}") from error

    def get_list(self, key: str, kind: type[T]) -> list[T]:
        """Return an array of values of one type, or an empty list.

        Raises `ModelUnavailable` if the value has another type.
        """
        values = self.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self._damaged_error(f"{key} is not an array of {kind.__name__}")
        return values

    def metadata_bytes(self) -> bytes:
        """Return the stored metadata. Equal bytes mean an equal tokenizer and configuration."""
        return self._map[: self._metadata_end]

    def tensor(self, name: str) -> Floats:
        """Return a copy of a tensor as float32. Raises `ModelUnavailable` if it is absent."""
        return copy_floats(self.stored(name))

    def stored(self, name: str) -> Stored:
        """Return a tensor that is not packed in the file; see `read_values`. Raises
        `ModelUnavailable` if it is absent."""
        import numpy as np

        info = self.tensors.get(name)
        if info is None:
            raise ModelUnavailable(f"{self.path.name} has no tensor {name}")
        raw = np.frombuffer(self._map, np.uint8, self._count_bytes(name, info), info.start)
        return read_values(info.kind, raw).reshape(info.shape)

    def check_tensors(self) -> None:
        """Raise `ModelUnavailable` unless `tensor` can read every tensor."""
        for name, info in self.tensors.items():
            self._count_bytes(name, info)

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise ModelUnavailable(f"{self.path} is not a GGUF file")
        (version,) = _U32.unpack_from(self._map, 4)
        if version not in {2, 3}:
            raise ModelUnavailable(f"{self.path.name}: GGUF version {version} is not supported")
        (tensor_count,) = _U64.unpack_from(self._map, 8)
        (value_count,) = _U64.unpack_from(self._map, 16)
        at = 24
        for _ in range(self._count_entries(value_count, at)):
            at = self._read_value(at)
        self._metadata_end = at
        self.tensors = dict(self._read_tensors(self._count_entries(tensor_count, at), at))

    def _read_value(self, at: int) -> int:
        key, at = self._read_string(at)
        (kind,) = _U32.unpack_from(self._map, at)
        start = at + 4
        self._value_readers[key] = lambda: self._decode(kind, start)[0]
        return self._skip(kind, start)

    def _read_tensors(self, count: int, at: int) -> Iterator[tuple[str, TensorInfo]]:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, at = self._read_string(at)
            (dims,) = _U32.unpack_from(self._map, at)
            if dims > MAX_DIMENSIONS:
                raise self._damaged_error(f"{name} has {dims} dimensions")
            fields = Struct(f"<{dims}QIQ")
            *shape, kind, offset = fields.unpack_from(self._map, at + 4)
            at += 4 + fields.size
            entries.append((name, tuple(reversed(shape)), kind, offset))
        align = self.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise self._damaged_error(f"alignment {align}")
        data = -(-at // align) * align
        for name, dimensions, kind, offset in entries:
            yield name, TensorInfo(dimensions, kind, data + offset)

    def _count_bytes(self, name: str, info: TensorInfo) -> int:
        shape = info.shape
        per_block, block_bytes = block_layout(info.kind)
        count = prod(shape)
        if count == 0 or (per_block > 1 and (not shape or shape[-1] % per_block)):
            raise self._damaged_error(f"{name} has shape {shape}")
        size = count // per_block * block_bytes
        if info.start + size > self._size_bytes:
            raise self._damaged_error(f"{name} reaches beyond the end of the file")
        return size

    def _decode(self, kind: int, at: int, depth: int = 0) -> tuple[Any, int]:
        if kind == _STRING:
            return self._read_string(at)
        if kind != _ARRAY:
            scalar = self._scalar_format(kind)
            return scalar.unpack_from(self._map, at)[0], at + scalar.size
        inner, count, at = self._read_array_header(at, depth)
        if inner in _SCALARS:
            fields = Struct(f"<{count}{_SCALARS[inner].format[1:]}")
            return list(fields.unpack_from(self._map, at)), at + fields.size
        values = []
        for _ in range(count):
            value, at = self._decode(inner, at, depth + 1)
            values.append(value)
        return values, at

    def _skip(self, kind: int, at: int, depth: int = 0) -> int:
        if kind == _STRING:
            return self._check_offset(at + 8 + _U64.unpack_from(self._map, at)[0])
        if kind != _ARRAY:
            return self._check_offset(at + self._scalar_format(kind).size)
        inner, count, at = self._read_array_header(at, depth)
        self._count_entries(count, at)
        if inner in _SCALARS:
            return self._check_offset(at + count * _SCALARS[inner].size)
        if inner == _STRING:
            read_length, data = _U64.unpack_from, self._map
            for _ in range(count):
                at += 8 + read_length(data, at)[0]
            return self._check_offset(at)
        for _ in range(count):
            at = self._skip(inner, at, depth + 1)
        return at

    def _read_array_header(self, at: int, depth: int) -> tuple[int, int, int]:
        if depth >= _MAX_NESTING:
            raise self._damaged_error("arrays are nested too deeply")
        (inner,) = _U32.unpack_from(self._map, at)
        (count,) = _U64.unpack_from(self._map, at + 4)
        return inner, self._check_count(count, at), at + 12

    def _read_string(self, at: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._map, at)
        end = self._check_offset(at + 8 + length)
        return self._map[at + 8 : end].decode(), end

    def _scalar_format(self, kind: int) -> Struct:
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._damaged_error(f"value of unknown type {kind}")
        return scalar

    def _check_offset(self, at: int) -> int:
        if at > self._size_bytes:
            raise self._damaged_error("a value reaches beyond the end of the file")
        return at

    def _check_count(self, count: int, at: int) -> int:
        if count > self._size_bytes - at:
            raise self._damaged_error(f"{count} entries are claimed")
        return count

    def _count_entries(self, count: int, at: int) -> int:
        self._entries += self._check_count(count, at)
        if self._entries > _MAX_ENTRIES:
            raise self._damaged_error(f"over {_MAX_ENTRIES} values and tensors")
        return count

    def _damaged_error(self, what: str) -> ModelUnavailable:
        return ModelUnavailable(f"{self.path.name} is damaged: {what}", hint="fetch the file again")


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading. Raises `ModelUnavailable`."""
    try:
        with path.open("rb") as source:
            return mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelUnavailable(f"{path} cannot be read: {reason}") from error


def close_map(data: mmap.mmap) -> None:
    """Unmap a file. A view that an error's traceback holds unmaps the file when the view ends."""
    with suppress(BufferError):
        data.close()
