"""Reader of safetensors folders, with a single file or shards. Source: the format's README.

A file has 8 bytes of header length, a JSON header, then the data. All offsets are checked.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dynamo.core.errors import DECODE_ERRORS, ModelUnavailable
from dynamo.models.checkpoint.gguf import MAX_DIMENSIONS, close_map, map_file
from dynamo.models.checkpoint.quantization import BF16, F16, F32, copy_floats, read_values

if TYPE_CHECKING:
    from dynamo.models.checkpoint.quantization import Floats, Stored

_DTYPES = {"F32": (F32, 4), "F16": (F16, 2), "BF16": (BF16, 2)}
_MAX_HEADER_BYTES = 100 << 20
_MAX_TENSORS = 1 << 19
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class _TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _MappedTensor(NamedTuple):
    data: mmap.mmap
    entry: _TensorEntry
    base: int


class SafetensorsFolder:
    """The memory-mapped tensors of a model folder, decoded on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: list[mmap.mmap] = []
        self.tensors: dict[str, _MappedTensor] = {}
        for path in weight_files(folder):
            self._read_file(path)

    def close(self) -> None:
        """Unmap all files, each when no array in it is left."""
        for data in self._maps:
            close_map(data)

    def tensor(self, name: str) -> Floats:
        """Return a copy of a tensor as float32. Raises `ModelUnavailable` if it is absent."""
        return copy_floats(self.stored(name))

    def stored(self, name: str) -> Stored:
        """Return a tensor in the file, which is read as its values are used; see `read_values`.
        Raises `ModelUnavailable` if it is absent."""
        import numpy as np

        if name not in self.tensors:
            raise ModelUnavailable(f"{self.folder.name} has no tensor {name}")
        data, entry, base = self.tensors[name]
        if entry.dtype not in _DTYPES:
            raise ModelUnavailable(
                f"{name} has the unsupported type {entry.dtype}",
                hint="use weights in F32, F16 or BF16",
            )
        start, end = entry.data_offsets
        raw = np.frombuffer(data, np.uint8, end - start, base + start)
        return read_values(_DTYPES[entry.dtype][0], raw).reshape(entry.shape)

    def _read_file(self, path: Path) -> None:
        data = map_file(path)
        self._maps.append(data)
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(_MAX_HEADER_BYTES, len(data) - 8):
            raise _damaged_error(path, "the header does not fit")
        try:
            header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            if len(header) > _MAX_TENSORS:
                raise _damaged_error(path, f"the header has over {_MAX_TENSORS} tensors")
            entries = {n: msgspec.json.decode(raw, type=_TensorEntry) for n, raw in header.items()}
        except DECODE_ERRORS as error:
            raise _damaged_error(path, f"the header is not valid ({error})") from error
        base = 8 + length
        for name, entry in entries.items():
            _check_entry(path, name, entry, len(data) - base)
            self.tensors[name] = _MappedTensor(data, entry, base)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, which may be none.

    Raises `ModelUnavailable` if a shard in the index is missing.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []
    try:
        shards = msgspec.json.decode(index.read_bytes(), type=_ShardIndex).weight_map.values()
    except (OSError, *DECODE_ERRORS) as error:
        raise _damaged_error(index, str(error)) from error
    paths = [folder / Path(name).name for name in sorted(set(shards))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelUnavailable(
            f"{folder} lacks {', '.join(missing)}, named in {INDEX_FILE}",
            hint="fetch the model again",
        )
    return paths


def _check_entry(path: Path, name: str, entry: _TensorEntry, data_bytes: int) -> None:
    start, end = entry.data_offsets
    if not 0 <= start <= end <= data_bytes or min(entry.shape, default=0) < 0:
        raise _damaged_error(path, f"{name} lies outside the file")
    if len(entry.shape) > MAX_DIMENSIONS:
        raise _damaged_error(path, f"{name} has {len(entry.shape)} dimensions")
    if entry.dtype in _DTYPES:
        size = _DTYPES[entry.dtype][1] * prod(entry.shape)
        if size != end - start:
            raise _damaged_error(path, f"{name} has {end - start} bytes for shape {entry.shape}")


def _damaged_error(path: Path, what: str) -> ModelUnavailable:
    return ModelUnavailable(f"{path.name} is damaged: {what}", hint="fetch the file again")
