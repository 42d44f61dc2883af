"""The parts of gpu.py in one process: the card, kernels and logits, and engines."""

from __future__ import annotations

import math
import os
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_setup import BLOCK_TOKENS, Bench, Skipped
from gpu_tiers import check_copies, measure_tiers


def part_card(bench: Bench) -> None:
    """Measure the card's own speeds, and compare kernels and logits with their references."""
    torch = bench.torch
    with bench.step("speeds of the card"):
        source = torch.zeros(bench.size(1 << 30, 1 << 22), dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        bench.keep_speed(
            "copy", 2 * len(source) / bench.seconds(lambda: target.copy_(source)) / 1e9, "GB/s"
        )
        side = bench.size(8192, 128)
        matrix = torch.randn(side, side, device=bench.device).to(getattr(torch, bench.dtype))
        bench.keep_speed(
            "matrix", 2 * side**3 / bench.seconds(lambda: matrix @ matrix) / 1e12, "TFLOP/s"
        )
        host = torch.zeros(
            len(source) // 4, dtype=torch.uint8, pin_memory=bench.device.type == "cuda"
        )
        part = target[: len(host)]
        bench.keep_speed(
            "to the card", len(host) / bench.seconds(lambda: part.copy_(host)) / 1e9, "GB/s"
        )
        bench.keep_speed(
            "from the card", len(host) / bench.seconds(lambda: host.copy_(part)) / 1e9, "GB/s"
        )
    with bench.step("copies of blocks"):
        check_copies(bench)
    shapes = bench.size([(8, 2, 128), (6, 2, 80), (4, 4, 64), (32, 8, 128)], [(2, 1, 16)])
    for dtype in (torch.float32, torch.bfloat16)[: bench.size(2, 1)]:
        for shape in shapes:
            with bench.step(f"kernels, {shape[0]}:{shape[1]} heads of {shape[2]}, {dtype}"):
                check_kernels(bench, shape, dtype)
    for name in ("qwen", "llama")[: bench.size(2, 1)]:
        check_logits(bench, name)


def check_kernels(bench: Bench, shape: tuple[int, int, int], dtype: Any) -> None:
    """Compare every Triton kernel with the function that is its reference."""
    if not find_spec("triton") or not find_spec("dynamo.inference.torch.kernels"):
        raise Skipped("no Triton, or no kernels in this version")
    from dynamo.inference.torch import attention, backend, kernels
    from dynamo.inference.torch.batch import make_paged_batch

    torch, (heads, kv_heads, dim) = bench.torch, shape
    torch.manual_seed(2)
    sequences = [(16, 40), (0, 37), (99, 1), (15, 1), (0, 1), (bench.size(2000, 40), 1)]
    numbers = iter(torch.randperm(256).tolist())
    chunks: list[Any] = []
    for start, count in sequences:
        table = [
            SimpleNamespace(id=next(numbers)) for _ in range(-(-(start + count) // BLOCK_TOKENS))
        ]
        tokens = SimpleNamespace(tokens=range(start + count))
        chunks.append(
            SimpleNamespace(sequence=tokens, start=start, count=count, samples=True, blocks=table)
        )
    batch = make_paged_batch(chunks, BLOCK_TOKENS, bench.device)
    rows = len(batch.token_ids)
    blocks = torch.randn(256, 2, kv_heads, BLOCK_TOKENS, dim, device=bench.device).to(dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=bench.device).to(dtype)
    angles = torch.randn(rows, dim // 2, device=bench.device)
    written, rotation = blocks.clone(), (torch.cos(angles), torch.sin(angles))
    queries = attention.rotate_rows(qkv, blocks, batch.slots, heads, rotation)
    actual = kernels.rotate(
        qkv, written, batch.slots, heads, rotation=rotation, factors=None, eps=1e-6
    )
    pairs = {"rotation": (actual, queries), "cache write": (written, blocks)}
    queries = queries / dim**0.5
    tiles = kernels.make_prefill_tiles(batch, heads // kv_heads)
    for window, softcap in ((0, 0.0), (20, 5.0)):
        args = window, softcap
        expected = attention.attend_blocks(queries, blocks, batch, *args)
        pairs[f"attention, window {window}"] = (
            kernels.attend(queries, blocks, batch, tiles, *args),
            expected,
        )
    gate_up = torch.randn(5, 2 * 1025, device=bench.device).to(dtype)
    for activation in ("silu", "gelu_tanh"):
        pairs[activation] = (
            kernels.gate_rows(gate_up, activation),
            backend.gate_rows(gate_up, activation),
        )
    for name, pair in pairs.items():
        check_distance(bench, name, *pair, 1e-4 if dtype == torch.float32 else 0.02)


def check_distance(bench: Bench, name: str, actual: Any, expected: Any, most: float) -> None:
    """Add the relative distance of two tensors, which must be small."""
    actual, expected = actual.float(), expected.float().to(actual.device)
    distance = float((actual - expected).norm() / expected.norm())
    bench.figure(name, distance, "relative")
    assert distance <= most, f"{name}: relative distance {distance:.3g}, at most {most}"


def check_logits(bench: Bench, name: str) -> None:
    """Compare the logits of two layers: with kernels, without, and those of transformers."""
    torch = bench.torch
    ids = torch.randint(0, 40_000, (bench.size(200, 40),)).tolist()
    plain: Any = None
    with bench.step(f"{name}: logits of the plain path against transformers, float32"):
        folder = bench.model(name, 2)
        plain = logits(bench, folder, ids, "float32")
        if not find_spec("transformers"):
            raise Skipped("no transformers")
        from transformers import AutoModelForCausalLM

        other = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).to(
            bench.device
        )
        with torch.inference_mode():
            expected = other(torch.tensor([ids], device=bench.device)).logits[0, -1:]
        check_distance(bench, "logits", plain, expected, 1e-3)
    for dtype, most in (("float32", 1e-3), ("bfloat16", 0.05)):
        with bench.step(f"{name}: logits with kernels against the plain path, {dtype}"):
            check_distance(
                bench, "logits", logits(bench, folder, ids, dtype, kernels=True), plain, most
            )


def logits(bench: Bench, folder: Path, ids: list[int], dtype: str, *, kernels: bool = False) -> Any:
    """Return the logits of the last of `ids`, computed as two chunks and one token."""
    from dynamo.inference.native.decoder import DecoderModel
    from dynamo.inference.torch.backend import TorchBackend
    from dynamo.inference.torch.batch import make_paged_batch
    from dynamo.models.checkpoint.weights import open_weights

    torch, number_format = bench.torch, getattr(bench.torch, dtype)
    table = [SimpleNamespace(id=n) for n in torch.randperm(-(-len(ids) // BLOCK_TOKENS)).tolist()]
    with torch.inference_mode(), open_weights(folder) as weights:
        config = weights.config
        backend = TorchBackend(config, weights.rotary(), bench.device, number_format)
        if kernels and not hasattr(backend.attention, "uses_kernels"):
            raise Skipped("no kernels in this version")
        if kernels and dtype == "bfloat16" and bench.device.type == "cpu":
            raise Skipped("Triton's interpreter multiplies bfloat16 as integers")
        backend.attention.uses_kernels = kernels  # type: ignore[attr-defined,unused-ignore]
        dims = (config.num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
        backend.attention.kv_blocks = torch.full(
            (len(table), *dims), torch.nan, device=bench.device, dtype=number_format
        )
        model = DecoderModel(weights, backend)
        for start, end in ((0, 20), (20, len(ids) - 1), (len(ids) - 1, len(ids))):
            sequence = SimpleNamespace(tokens=ids)
            chunk: Any = SimpleNamespace(
                sequence=sequence, start=start, count=end - start, samples=True, blocks=table
            )
            result = model.forward(make_paged_batch([chunk], BLOCK_TOKENS, bench.device))
        return result.clone()


async def decode_step(
    bench: Bench,
    engine: Any,
    batch: int,
    *,
    name: str,
    least: float = -math.inf,
    share: float = 0.0,
) -> None:
    """Measure decode at one batch size, against what its bytes take at the speed of copies."""
    from native_engine import decode

    with bench.step(f"{name}: decode at {batch}"):
        prompt, tokens = bench.size(1024 if share else 128, 40), bench.size(64, 6)
        rate = await decode(engine, batch, prompt, tokens)
        bench.figure(f"{name} decode at {batch}", rate, "tokens/s", least=least)
        if share:
            config = read_shape(bench, name)
            item = 2 if bench.dtype == "bfloat16" else 4
            kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
            step = item * (
                config.count_weights()
                - config.vocab_size * config.hidden_size * (not config.tied)
                + batch * (prompt + tokens // 2) * kv
            )
            part = rate / batch * step / (bench.speeds["copy"] * 1e9)
            bench.figure(f"{name} decode at {batch}, of the copy speed", part, "share", least=share)


def read_shape(bench: Bench, name: str) -> Any:
    from dynamo.models.checkpoint.architectures import read_config

    return read_config(bench.model(name) / "config.json", frozenset())


async def idle_step(bench: Bench, engine: Any, name: str) -> None:
    """Measure for how much of decode at 32 no kernel runs, in the middle of a profile."""
    from native_engine import decode

    with bench.step(f"{name}: the card idle in decode at 32"):
        if bench.device.type != "cuda":
            raise Skipped("no card")
        profiler = bench.torch.profiler
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            await decode(engine, 32, 64, 64)
        events = [
            event.time_range for event in profile.events() if "CUDA" in str(event.device_type)
        ]
        spans = sorted((span.start, span.end) for span in events)
        first, last = spans[0][0], spans[-1][1]
        low, high = first + 0.5 * (last - first), first + 0.9 * (last - first)
        busy, until = 0.0, low
        for start, end in spans:
            busy += max(0.0, min(end, high) - max(start, until))
            until = max(until, min(end, high))
        bench.figure(
            f"{name}, card idle in decode at 32", 1 - busy / (high - low), "share", most=0.05
        )
    with bench.step(f"{name}: CUDA graphs"):
        owners = (engine.runner, *vars(engine.runner).values())
        graphs = [
            key
            for owner in owners
            for key in getattr(owner, "__dict__", {})
            if "graph" in key.lower()
        ]
        if not graphs:
            raise Skipped("no CUDA graphs in this version")
        bench.figure("attributes that hold graphs", len(graphs), "")


async def part_qwen(bench: Bench) -> None:
    """Measure the small model: decode of a large batch, and tiers."""
    engine: Any = None
    batch = bench.size(256, 3)
    with bench.step("Qwen3-0.6B: start"):
        blocks = bench.size(6000, 100)
        engine = await bench.engine(
            bench.model("qwen"),
            num_blocks=blocks,
            max_num_seqs=batch,
            max_num_batched_tokens=bench.size(8192, 64),
        )
    if engine is None:
        return
    await decode_step(bench, engine, batch, name="qwen", least=12_000)
    await idle_step(bench, engine, "qwen")
    with bench.step("qwen: tiers"):
        await measure_tiers(bench, engine)
    await engine.stop()


async def part_llama(bench: Bench) -> None:
    """Measure the large model: start, decode, prefill, first token."""
    from native_engine import answer, prefill

    engine: Any = None
    with bench.step("Llama-3.1-8B: start"):
        weights = bench.model("llama") / "model.safetensors"
        size, read_s = weights.stat().st_size, read_file(weights)
        drop_pages(weights)
        began = time.perf_counter()
        engine = await bench.engine(
            weights.parent,
            num_blocks=bench.size(5500, 100),
            max_num_batched_tokens=bench.size(8192, 64),
            prefix_caching=False,
        )
        await answer(engine, 32, 1)
        start_s = time.perf_counter() - began
        bench.figure("read from disk", size / read_s / 1e9, "GB/s")
        bench.figure("start to first token", start_s, "s")
        bench.figure(
            "start to first token, of the time to read", start_s / read_s, "times", most=1.5
        )
    if engine is None:
        return
    config = read_shape(bench, "llama")
    await decode_step(bench, engine, 1, name="llama", share=0.75)
    await decode_step(bench, engine, bench.size(64, 2), name="llama", share=0.65)
    with bench.step("llama: prefill"):
        tokens = bench.size(8192, 128)
        await prefill(engine, tokens)
        rate = max([await prefill(engine, tokens) for _ in range(3)])
        matrices = config.count_weights() - config.vocab_size * config.hidden_size * (
            2 - config.tied
        )
        attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens
        bench.figure(f"prefill of {tokens}", rate, "tokens/s")
        share = rate * (2 * matrices + attention) / (bench.speeds["matrix"] * 1e12)
        bench.figure(f"prefill of {tokens}, of the matrix speed", share, "share", least=0.45)
    with bench.step("llama: first token"):
        tokens = bench.size(1024, 32)
        times = sorted([tokens / await prefill(engine, tokens) for _ in range(5)])
        bench.figure(f"first token of a prompt of {tokens}, median", times[2] * 1e3, "ms", most=35)
    await idle_step(bench, engine, "llama")
    await engine.stop()


def drop_pages(path: Path) -> None:
    """Drop the pages of a file from memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path) -> float:
    """Return the time to read a file from disk."""
    drop_pages(path)
    buffer, began = bytearray(1 << 24), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began
