"""Encodings of blocks: zstd is lossless, int8 is close, and damage is noticed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.inference.model_runner import BlockShape
from dynamo.inference.tiers.codecs import RAW, ZSTD, BlockCodec, CorruptBlock, open_codec

SHAPE = (6, 16, 32)  # groups, tokens, channels


def decode(codec: BlockCodec, kind: int, data: bytes | memoryview) -> bytes:
    block = bytearray(codec.block_bytes)
    codec.decode(kind, memoryview(data), memoryview(block))
    return bytes(block)


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("float32", 3.1), ("float16", 1.55), ("bfloat16", 1.55)]
)
def test_int8_rounds_to_a_scale_for_each_channel(dtype: str, ratio: float) -> None:
    numbers = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    numbers *= np.geomspace(1e-3, 1e3, SHAPE[2], dtype=np.float32)  # channels differ a lot
    numbers[0] = 0
    if dtype == "bfloat16":
        numbers = (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)
        block = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        block = numbers.astype(dtype).tobytes()
    codec = open_codec("int8", len(block), BlockShape(SHAPE[1], SHAPE[2], dtype))

    kind, data = codec.encode(memoryview(block))
    decoded = decode(codec, kind, data)

    assert len(block) / len(data) > ratio
    if dtype == "bfloat16":
        words = np.frombuffer(decoded, np.uint16).astype(np.uint32) << 16
        result = words.view(np.float32).reshape(SHAPE)
    else:
        result = np.frombuffer(decoded, dtype).astype(np.float32).reshape(SHAPE)
    peaks = np.abs(numbers).max(axis=1, keepdims=True)
    rounding = {"float32": 0, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    assert (np.abs(result - numbers) <= peaks * (0.51 / 127 + rounding)).all()


def test_int8_keeps_blocks_that_are_not_finite() -> None:
    numbers = np.ones(SHAPE, np.float32)
    numbers[1, 2, 3] = np.inf
    block = numbers.tobytes()
    codec = open_codec("int8", len(block), BlockShape(SHAPE[1], SHAPE[2]))

    kind, data = codec.encode(memoryview(block))

    assert kind == RAW
    assert decode(codec, kind, data) == block


@pytest.mark.parametrize("block", [bytes(4096), bytes(range(256)) * 16])
def test_zstd_is_lossless(block: bytes) -> None:
    codec = open_codec("zstd", len(block))
    kind, data = codec.encode(memoryview(block))

    assert len(data) < len(block) / 10
    assert decode(codec, kind, data) == block


@pytest.mark.parametrize("name", ["none", "zstd", "int8"])
def test_what_is_no_encoding_is_refused(name: str) -> None:
    codec = open_codec(name, 4096, BlockShape(16, 32))
    for kind in range(4):
        for data in (b"", bytes(100), bytes(4097), b"\x28\xb5\x2f\xfd\xff"):
            with pytest.raises(CorruptBlock):
                decode(codec, kind, data)


@pytest.mark.parametrize("size", [4097, 1 << 26, 1 << 45])
def test_zstd_of_another_size_is_not_decoded(size: int) -> None:
    codec = open_codec("zstd", 4096)
    header = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little")  # of a frame in one segment
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBlock, match=str(size)):
            decode(codec, ZSTD, header + b"\x01\x00\x00")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_int8_needs_channels() -> None:
    for shape in (None, BlockShape(16, 30)):
        with pytest.raises(ConfigError, match="no channels"):
            open_codec("int8", 4096, shape)
