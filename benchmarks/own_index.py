"""The part `index` of `several_models.py`: three models in one deployment, or in one each."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from load import cpu_seconds, vocabulary
from processes import deployment_of
from servers import Server, answers, free_port
from streams import Stream, StreamClient, now, percentiles_ms

TOKENS, STEP_MS, SLOTS, WORKERS = 10, 40, 4, 2
BLOCKS = {"a": 16, "b": 32, "c": 16}
GROUPS, SHARED_WORDS, WORDS_A_TURN = 12, 200, 8
"""Conversations of the part `index`, the words of their first prompts, and what each turn adds."""


def start(args: argparse.Namespace, names: Sequence[str], workers: int = WORKERS) -> Server:
    """Start a deployment with a mock model of each name."""
    port, folder = free_port(), Path(tempfile.mkdtemp())
    counts: dict[str, Any] = {"workers": workers}
    if args.roles:
        half = [{"replicas": workers // 2}]
        counts = {"prefill_workers": half, "decode_workers": half}
    entries = [
        {"path": args.model or "", "names": [name], "engine.block_size": BLOCKS[name], **counts}
        for name in names
    ]
    settings: dict[str, Any] = {
        "server": {"http_port": port, "http_workers": args.frontends},
        "router": {"mode": "kv", "replicas": args.routers, "port": 0},
        "index": {"shared": args.shared_index},
        "engine": {
            "kind": "mock",
            "timing": f"constant:0.01,{STEP_MS}",
            "max_num_seqs": args.slots,
        },
        "models": entries,
    }
    if args.tiers:
        settings["engine"]["num_blocks"] = 400
        settings["cache"] = {"cpu_size": "4MiB", "ssd_size": "100MiB", "ssd_path": f"{folder}/kv"}
    file = folder / "models.yaml"
    file.write_text(json.dumps(settings))
    commands = [["run", "-f", str(file)]]
    if args.shared_index:
        commands.append(["indexer", "--deployment", f"http-{port}"])
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "dynamo", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for words in commands
    ]
    url = f"http://127.0.0.1:{port}"
    for name in names:
        answers(url, name, children)
    return Server(url, [], [], children)


def hit_ratio(url: str, model: str) -> float:
    """Return the share of a model's prompt tokens that its engines took from their caches."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        text = answer.read().decode()
    values = [
        float(match[1])
        for name in ("cached", "prompt")
        if (match := re.search(rf'router_{name}_tokens_total{{model="{model}"}} (\S+)', text))
    ]
    return round(values[0] / values[1], 4)


def index_bytes(server: Server) -> float:
    """Return the bytes of the indexes of a deployment's processes."""
    total = 0.0
    for process in deployment_of(server).live_processes():
        with suppress(OSError), urllib.request.urlopen(process.status_url + "/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("dynamo_kv_index_bytes"):
                    total += float(line.rpartition(" ")[2])
    return total


def routing_cpu(servers: Sequence[Server]) -> float:
    """Return the CPU seconds of all processes but workers and supervisors."""
    return sum(
        cpu_seconds(process.pid)
        for server in servers
        for process in deployment_of(server).live_processes()
        if process.role in {"frontend", "router", "indexer"}
    )


async def converse(args: argparse.Namespace, servers: Mapping[str, Server]) -> dict[str, Any]:
    """Send each model prompts that share beginnings; return hits and times by model, and what the
    processes that route have used. `servers`: that of each model."""
    words, used = vocabulary(args.model), list(dict.fromkeys(servers.values()))
    clients = {model: StreamClient(server.url, words) for model, server in servers.items()}
    streams = {model: list[Stream]() for model in servers}
    rate = args.load * args.workers * args.slots / (TOKENS * STEP_MS / 1e3)
    period, before = GROUPS / rate, routing_cpu(used)
    turns = round(args.seconds / period)

    async def talk(model: str, number: int, group: int) -> None:
        """Send the prompts of a conversation, each after the answer of the one before."""
        due = now() + period * (group + number / len(servers)) / GROUPS
        for turn in range(turns):
            await asyncio.sleep(max(0.0, due - now()))
            due += period
            words, client = SHARED_WORDS + WORDS_A_TURN * turn, clients[model]
            request = client.encode_request(group, words, TOKENS, model)
            streams[model].append(await client.send(turn * GROUPS + group, request))

    async with asyncio.TaskGroup() as talks:
        for number, model in enumerate(clients):
            for group in range(GROUPS):
                talks.create_task(talk(model, number, group))
    cpu = routing_cpu(used) - before
    return {
        **{
            model: {
                "hit_ratio": hit_ratio(servers[model].url, model),
                "ttft_ms": percentiles_ms([stream.first_s for stream in own]),
            }
            for model, own in streams.items()
        },
        "cpu_s": round(cpu, 2),
        "index_bytes": sum(map(index_bytes, used)),
    }


async def index(args: argparse.Namespace) -> dict[str, Any]:
    """Return hits and times of all models in one deployment, and of each in its own."""
    rounds: dict[str, list[Any]] = {"together": [], "apart": []}
    for number in range(2 * args.rounds):
        kind = ("together", "apart")[(number + number // 2) % 2]
        if kind == "together":
            servers = dict.fromkeys(BLOCKS, start(args, list(BLOCKS), args.workers))
        else:
            servers = {model: start(args, [model], args.workers) for model in BLOCKS}
        try:
            rounds[kind].append(await converse(args, servers))
        finally:
            for server in set(servers.values()):
                server.stop()

    def mean(kind: str, *keys: str) -> float:
        values = rounds[kind]
        for key in keys:
            values = [value[key] for value in values]
        return sum(values) / len(values)

    summary: dict[str, Any] = {
        model: {
            "hit_difference": mean("together", model, "hit_ratio")
            - mean("apart", model, "hit_ratio"),
            **{
                f"ttft_{p}": mean("together", model, "ttft_ms", p)
                / mean("apart", model, "ttft_ms", p)
                for p in ("p50", "p99")
            },
        }
        for model in BLOCKS
    }
    for key in ("cpu_s", "index_bytes"):
        summary[key] = mean("together", key) / max(1e-9, mean("apart", key))
    worst = min(summary[model]["hit_difference"] for model in BLOCKS)
    return {**rounds, "summary": summary, "holds": worst >= -0.01}
