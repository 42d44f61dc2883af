"""Tools of the parts of gpu.py: steps, figures, random models, engines."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]
BLOCK_TOKENS = 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rope_theta": 5e5, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "rope_theta": 1e6,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_scaling": None,
}  # fmt: skip
TINY = {
    "vocab_size": 40_000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


class Skipped(Exception):
    """A step needs something that is not there."""


class Bench:
    """The options of one part, measured speeds, and a file with a line for each step."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch, self.quick, self.folder = torch, args.quick, Path(args.folder)
        self.device = torch.device(args.device)
        self.dtype = "float32" if args.device == "cpu" else "bfloat16"
        self._figures: list[dict[str, Any]] = []
        self._speeds = self.folder / "speeds.json"
        speeds = json.loads(self._speeds.read_text()) if self._speeds.exists() else {}
        self.speeds: defaultdict[str, float] = defaultdict(lambda: math.nan, speeds)
        self._record = (self.folder / f"{args.part}.jsonl").open("a", buffering=1)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run one step, which may contain others, and record how it ends. No exception leaves it."""
        outer, self._figures = self._figures, []
        began, state, detail = time.perf_counter(), "passed", ""
        self._write({"step": name, "state": "failed", "detail": "the process ended"})
        try:
            yield
        except Skipped as skipped:
            state, detail = "skipped", str(skipped)
        except (Exception, SystemExit):
            state, detail = "failed", "\n".join(traceback.format_exc().splitlines()[-6:])
        seconds = round(time.perf_counter() - began, 1)
        row = {"step": name, "state": state, "detail": detail, "seconds": seconds}
        self._write(row | {"figures": self._figures})
        self._figures = outer

    def _write(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self._record)

    def figure(self, name: str, value: float, unit: str, **limits: float) -> None:
        """Add a figure to the step, with `least` or `most`. Quick runs have no limits."""
        figure = {"name": name, "value": float(f"{value:.4g}"), "unit": unit}
        self._figures.append(figure if self.quick else figure | limits)

    def keep_speed(self, name: str, value: float, unit: str) -> None:
        """Add the speed of the card, on which later limits depend."""
        self.figure(name, value, unit)
        self.speeds[name] = value
        self._speeds.write_text(json.dumps(self.speeds))

    def seconds(self, work: Callable[[], Any], rounds: int = 5) -> float:
        """Return the least time of `work` on the device."""
        times = []
        for _ in range(rounds + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def wait(self) -> None:
        """Wait for the card."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def size(self, full: Any, quick: Any) -> Any:
        """Return a size of this run."""
        return quick if self.quick else full

    def model(self, name: str, layers: int = 0) -> Path:
        """Return the folder of a model, which is written on its first use."""
        shape = (LLAMA if name == "llama" else QWEN) | (TINY if self.quick else {})
        shape |= {"num_hidden_layers": layers, "vocab_size": 40_000} if layers else {}
        folder = self.folder / f"{name}-{shape['num_hidden_layers']}"
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(exist_ok=True)
            write_model(self, folder, shape)
        return folder

    async def engine(self, folder: Path, cache: Any = None, **settings: Any) -> Any:
        """Return a started engine over the weights in a folder."""
        from dynamo.core.clock import SystemClock
        from dynamo.core.settings.schema_cache import NO_TIERS
        from dynamo.core.settings.schema_engine import EngineSettings
        from dynamo.inference.engine import BatchedEngine
        from dynamo.inference.tiers.opening import tier_opener
        from dynamo.inference.torch.device import choose_device
        from dynamo.inference.torch.runner import TorchRunner
        from dynamo.models.checkpoint.weights import open_weights

        cache = cache or NO_TIERS
        threads = int(self.device.type == "cpu")
        chosen = EngineSettings(
            device=self.device.type, dtype=self.dtype, threads=threads, **settings
        )
        device = choose_device(chosen)
        assert device is not None
        runner = TorchRunner(lambda: open_weights(folder), chosen, device, cache=cache)
        engine = BatchedEngine(
            runner,
            prefix_caching=chosen.prefix_caching,
            open_tiers=tier_opener(cache, chosen, SystemClock()),
        )
        await engine.start()
        return engine


def write_model(bench: Bench, folder: Path, shape: dict[str, Any]) -> None:
    """Write random bfloat16 weights and a tokenizer."""
    from dynamo.models.checkpoint.architectures import read_config
    from dynamo.models.checkpoint.decoder_config import layer_parts, tensor_shape

    torch = bench.torch
    torch.manual_seed(1)
    (folder / "config.json").write_text(json.dumps(shape))
    config = read_config(folder / "config.json", frozenset())
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [] if config.tied else ["lm_head.weight"]
    names += [
        f"model.layers.{n}.{part}" for n in range(config.num_layers) for part in layer_parts(config)
    ]
    header, offset = {}, 0
    for name in names:
        dims = tensor_shape(name, config)
        end = offset + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            dims = tensor_shape(name, config)
            values = torch.randn(dims, device=bench.device, dtype=torch.float32)
            deviation = 0.02 if len(dims) == 1 or "embed" in name else 0.7 * dims[-1] ** -0.5
            values = values.mul_(deviation).add_(1.0 if len(dims) == 1 else 0.0)
            file.write(values.to(torch.bfloat16).view(torch.uint8).cpu().numpy().data)
        os.fsync(file.fileno())
    write_tokenizer(folder, config.vocab_size)


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of bytes, with a word for each further id."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocabulary = {chr(n if n in printable else next(others)): n for n in range(256)}
    vocabulary |= {f"Ġ{n}": n for n in range(256, size)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    document = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level}
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(document | {"model": model}))
