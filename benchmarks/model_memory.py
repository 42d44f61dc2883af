#!/usr/bin/env python3
"""Load native models of three sizes in a control group: does the memory hold, and do the numbers?

    benchmarks/model_memory.py [--orders 20] [--limits 900,1200,1600] [--folder DIR] [--seed 0]

For each order, a deployment starts in a control group with one of the limits (MiB, by turns). Its
three models have random weights, are loaded on demand, under the highest limit by chance also
always, and are asked in a random order. Then each that is loaded gets as many prompts at once as
fill its cache, so that it uses what it may use. `use` is the highest memory of the group without
file cache while that lasts, and `planned` is what the supervisor counts: the models that are loaded,
and its other processes.

Needs a control group that this process may change (version 2 or 1). Exits with 1 if a process was
killed, a request failed, or a use is more than 5 % from the plan.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from load import vocabulary
from servers import free_port
from streams import StreamClient
from targets import Targets

from dynamo.testing.family import write_family_folder

SIZES = {"small": (256, 4), "medium": (512, 6), "large": (768, 10)}
"""Size of the hidden state, and layers."""
KV_HEADS, HEAD_DIM, CONTEXT, BLOCK = 2, 64, 8192, 16
PROMPT, TOKENS = 1500, 256
TEMPLATE = 2 * BLOCK
"""Tokens of the chat template, and of a block that is not full."""
TOLERANCE = 0.05
ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
FILES = (
    ("memory.max", "memory.current", "memory.events"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
)
"""Files of a control group of version 2 and 1: limit, use, and the number of processes killed."""


def write_model(folder: Path, name: str) -> None:
    """Write a Llama with random weights, and a tokenizer that no other model has."""
    hidden, layers = SIZES[name]
    inner, rows = 2 * hidden, KV_HEADS * HEAD_DIM
    write_family_folder([f"<|{name}{i}|>" for i in range(len(name))], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for layer in range(layers):
        parts = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (rows, hidden),
            "self_attn.v_proj": (rows, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    write_tensors(folder / "model.safetensors", shapes)


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write random tensors as a safetensors file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        fields = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
        header[f"model.{name}.weight"] = fields
    head, rng = json.dumps(header).encode(), np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for shape in shapes.values():
            mean = 1.0 if len(shape) == 1 else 0.0
            file.write(rng.normal(mean, 0.02, shape).astype(np.float32).tobytes())


class Group:
    """A control group of a given size, which starts processes and counts their memory."""

    def __init__(self, limit_bytes: int) -> None:
        name = f"dynamo-memory-{os.getpid()}-{time.monotonic_ns()}"
        for root, files in zip(ROOTS, FILES, strict=True):
            self.folder, (limit, self._use, self._kills) = root / name, files
            with contextlib.suppress(OSError):
                if (root / "cgroup.procs").exists():
                    self.folder.mkdir()
                    (self.folder / limit).write_text(str(limit_bytes))
                    return
        sys.exit("no control group can be made here: run it as root, or in a delegated group")

    def run(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process in the group."""
        script = 'echo $$ > "$0" && exec "$@"'
        command = ["/bin/sh", "-c", script, str(self.folder / "cgroup.procs"), *command]
        with log.open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file)

    def use_bytes(self) -> int:
        """Return the memory in use without files, which the kernel drops when others need it."""
        stat = self._fields("memory.stat")
        files = sum(stat.get(key, 0) for key in ("inactive_file", "active_file"))
        return int((self.folder / self._use).read_text()) - files

    def kills(self) -> int:
        """Return how many processes were killed for want of memory."""
        return self._fields(self._kills)["oom_kill"]

    def _fields(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in map(str.split, lines)}

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        while self.folder.exists():
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                self.folder.rmdir()


class Peak(threading.Thread):
    """Follows the memory of a group."""

    def __init__(self, group: Group) -> None:
        super().__init__(daemon=True)
        self._group, self._ended = group, threading.Event()
        self.bytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, self._group.use_bytes())

    def stop(self) -> int:
        """End, and return the highest memory."""
        self._ended.set()
        self.join()
        return self.bytes


class Host:
    """A deployment in a control group."""

    def __init__(self, folder: Path, limit_mib: int, models: Sequence[Mapping[str, Any]]) -> None:
        self.group = Group(limit_mib << 20)
        self.log, port = folder / "log", free_port()
        self.log.write_bytes(b"")
        self.url = f"http://127.0.0.1:{port}"
        document = {"server": {"http_port": port}, "engine": {"kind": "native"}, "models": models}
        (folder / "models.yaml").write_text(json.dumps(document))
        command = [sys.executable, "-m", "dynamo", "run", "-f", str(folder / "models.yaml")]
        self.child = self.group.run(command, self.log)

    def wait(self, loaded: int) -> bool:
        """Wait until the deployment serves and has loaded a number of models. Returns False if it
        refused to start."""
        while self.child.poll() is None:
            with contextlib.suppress(OSError):
                if len(self.loaded()) >= loaded:
                    return True
            time.sleep(0.1)
        return False

    def loaded(self) -> Sequence[str]:
        """Return the models that are loaded."""
        with urllib.request.urlopen(self.url + "/v1/models", timeout=60) as answer:
            models = json.load(answer)["data"]
        return [each["id"] for each in models if each["status"]["value"] == "loaded"]

    def numbers(self, pattern: str) -> dict[str, int]:
        """Return numbers of the log by the name before them."""
        return {name: int(value) for name, value in re.findall(pattern, self.log.read_text())}

    def stop(self) -> None:
        """Stop the deployment and remove its group."""
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(60)
        self.group.remove()


class Prompts:
    """Prompts of these sizes for a model, sent at once. `errors` are those of answers."""

    def __init__(self, host: Host, folder: Path, name: str, sizes: Sequence[int], tokens: int):
        self._client = client = StreamClient(host.url, vocabulary(str(folder / name)), hung_s=600)
        requests = [
            client.encode_request(key, size, tokens, name) for key, size in enumerate(sizes)
        ]
        self.answers = [asyncio.create_task(client.send(*each)) for each in enumerate(requests)]
        self._name = name

    async def wait_until_computed(self) -> None:
        """Wait until all prompts are computed."""
        while any(not stream.times for stream in self._client.live) or not self._client.live:
            if all(answer.done() for answer in self.answers):
                return
            await asyncio.sleep(0.02)

    async def errors(self) -> Sequence[str]:
        """Return the errors of the answers when they have ended."""
        streams = await asyncio.gather(*self.answers)
        return [f"{self._name}: {stream.error}" for stream in streams if stream.error]


async def fill(host: Host, folder: Path, names: Sequence[str]) -> Sequence[str]:
    """Fill the caches of models. The largest begins, since its answers take longest, and the next
    one follows when all prompts of the last one are computed."""
    blocks = host.numbers(r"(\w+)-worker +\|.* blocks=(\d+)")
    sent = list[Prompts]()
    for name in sorted(names, key=list(SIZES).index, reverse=True):
        tokens = blocks[name] * BLOCK
        prompts = -(-tokens // PROMPT)
        sizes = [tokens // prompts - TOKENS - TEMPLATE] * prompts
        sent.append(Prompts(host, folder, name, sizes, TOKENS))
        await sent[-1].wait_until_computed()
    return [error for each in sent for error in await each.errors()]


async def run_order(args: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """Run one order, and return its figures."""
    rng = random.Random(f"{args.seed} {number}")
    names, limit_mib = rng.sample(list(SIZES), 3), args.limits[number % len(args.limits)]
    choices = ["always", "on_demand"][limit_mib < max(args.limits) :]  # where all fit
    loads = {name: rng.choice(choices) for name in names}
    models = [{"path": str(folder / n), "name": n, "load": loads[n]} for n in names]
    host = Host(folder, limit_mib, models)
    report = {"limit": limit_mib, "order": [f"{name} {loads[name]}" for name in names]}
    try:
        if not host.wait(list(loads.values()).count("always")):
            return report | {"refused": host.log.read_text().strip().splitlines()[-2:]}
        errors: list[str] = []
        for name in names:
            errors += await Prompts(host, folder, name, [8], 8).errors()
        loaded = host.loaded()
        peak = Peak(host.group)
        peak.start()
        errors += await fill(host, folder, loaded)
        use_mib = peak.stop() >> 20
        planned = host.numbers(r"(\w+)[ =\"]+(\d+) MiB")
        planned_mib = planned["others"] + sum(planned[name] for name in loaded)
        report |= {"loaded": loaded, "use": use_mib, "planned": planned_mib, "errors": errors}
        return report | {"share": round(use_mib / planned_mib, 3), "kills": host.group.kills()}
    finally:
        host.stop()


def main() -> int:
    """Run all orders, and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--limits", default="900,1200,1600")
    parser.add_argument("--folder", type=Path, help="keep the models here")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.limits = [int(limit) for limit in args.limits.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for name in SIZES:
            if not (folder / name / "model.safetensors").is_file():
                write_model(folder / name, name)
        orders = []
        for number in range(args.orders):
            orders.append(asyncio.run(run_order(args, folder, number)))
            print(json.dumps(orders[-1]), file=sys.stderr, flush=True)
    served = [order for order in orders if "share" in order]
    shares = [order["share"] for order in served]
    targets = Targets()
    targets.at_most("processes killed", sum(order["kills"] for order in served), 0)
    targets.at_most("failed requests", sum(len(order["errors"]) for order in served), 0)
    targets.at_most("orders refused at the start", len(orders) - len(served), 0)
    targets.at_least("lowest use / planned", min(shares), 1 - TOLERANCE)
    targets.at_most("highest use / planned", max(shares), 1 + TOLERANCE)
    targets.print_report({"shares": sorted(shares)}, f"{len(orders)} orders")
    return targets.exit_code


if __name__ == "__main__":
    sys.exit(main())
