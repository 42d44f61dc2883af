#!/usr/bin/env python3
"""Inject causes of slow requests among healthy traffic, and count how often `dynamo why` names them.

    benchmarks/blame.py --model DIR [--causes frozen,overload] [--requests 200] [--scene held-out]

For each cause, a fresh deployment first serves healthy requests. Then the cause is injected again
and again, in turn with the same scene without it, the calm one. A request was slowed by the cause
if it took `SLOWED_S` longer than the median of calm ones, and longer than 95 % of them. The run ends
when there are enough of them. The target is that the observer names the cause first for 95 % of
them; of a pair, both among the first two.

At most 2 % of the other requests may be blamed. These are calm requests, those that came at other
times, and those that lost no worker and took no longer than usual. Healthy requests that were slow
at the time of the cause are only shown, since the machine has slowed some of them. Time in which
this process itself stood still is subtracted.

The verdict was developed with the scenes `tuned` (2 mock workers) and `native` (the native engine
with made-up weights). `held-out` (4 mock workers, a router process, other sizes and rates) was not
looked at before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from blame_client import (
    CACHE_TOKENS,
    DELAY_FILE,
    HELD_OUT,
    LATE_S,
    NATIVE,
    PLUG,
    TUNED,
    Call,
    Client,
    Size,
)
from blame_scenes import SCENARIOS, Scenario
from processes import deployment_of, ready
from servers import Server, start_ours
from targets import Targets
from tests.support.servers import NatsProcess, S3Process, ServerProcess

HEALTHY, CALM = 60, 24
BETWEEN_S = 0.7
SCENES = {"tuned": TUNED, "held-out": HELD_OUT, "native": NATIVE}
NATIVE_SCENARIOS = ("frozen", "killed", "long_prompt", "overload", "salted", "stalled")
PYTHON_PATH = os.environ.get("PYTHONPATH", "")
Story = dict[str, Any]


def fetch_stories(server: Server) -> dict[str, Story]:
    """Return the stories by the client's request id."""
    observer = ready(deployment_of(server), "observer")[0]
    stories: dict[str, Story] = {}
    for query in ("?limit=9000", "?limit=9000&failed=1"):
        with urllib.request.urlopen(f"{observer.address}/requests{query}", timeout=60) as answer:
            for story in json.load(answer)["requests"]:
                stories[story["client_id"]] = story
    return stories


async def send_steadily(client: Client) -> None:
    """Send healthy requests, one after the other."""
    while True:
        await asyncio.sleep(client.size.every_s)
        await client.burst("h", 1)


def write_native_model(source: Path, folder: Path) -> None:
    """Write a small model with the tokenizer of `source` and made-up weights."""
    import numpy as np
    from tests.support.tiny_bert import write_safetensors

    config = json.loads((source / "config.json").read_text())
    hidden, layers, inner, heads, kv_heads = 64, 2, 128, 4, 2
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        kv_size = kv_heads * hidden // heads
        sizes = {"q": (hidden, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden)}
        for part, shape in {**sizes, "o": (hidden, hidden)}.items():
            shapes[f"{name}.self_attn.{part}_proj.weight"] = shape
        for part in ("gate", "up"):
            shapes[f"{name}.mlp.{part}_proj.weight"] = (inner, hidden)
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
    rng = np.random.default_rng(3)
    folder.mkdir()
    weights = {k: rng.normal(0, 0.1, shape).astype(np.float32) for k, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())


async def run(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Inject one cause until enough requests were slowed by it."""
    scenario, size, model = SCENARIOS[name], SCENES[args.scene], Path(args.model)
    if size.engine == "native":
        model = folder / "model"
        if not model.exists():
            write_native_model(Path(args.model), model)
    (folder / "sitecustomize.py").write_text(PLUG)
    python_path = os.pathsep.join(filter(None, (str(folder), PYTHON_PATH)))
    os.environ |= {"PYTHONPATH": python_path, DELAY_FILE: str(folder / "delay")}
    with contextlib.ExitStack() as stack:
        service = None if scenario.service is None else scenario.service()
        os.environ.pop("DYNAMO_NATS_URL", None)
        if service is not None:
            stack.enter_context(service)
            os.environ.update(environ_of(service))
        return await run_scenario(scenario, size, args, str(model), service)


def environ_of(service: ServerProcess) -> dict[str, str]:
    """Return the variables by which a deployment finds a server."""
    if isinstance(service, NatsProcess):
        return {"DYNAMO_NATS_URL": service.url}
    return service.environ if isinstance(service, S3Process) else {}


def start(scenario: Scenario, size: Size, model: str) -> Server:
    """Start the deployment of a scenario."""
    token_ms, step_ms = scenario.timing or (size.token_ms, size.step_ms)
    timing = ("--timing", f"constant:{token_ms},{step_ms}") if size.engine == "mock" else ()
    blocks = str(CACHE_TOKENS // size.block)
    flags = [flag.format(blocks=blocks, slots=size.slots) for flag in scenario.flags]
    flags += [*timing, *size.flags, "--block-size", str(size.block)]
    return start_ours(model, size.workers, 1.0, "kv", *flags, engine=size.engine, timeout_s=180)


async def run_scenario(
    scenario: Scenario,
    size: Size,
    args: argparse.Namespace,
    model: str,
    service: ServerProcess | None,
) -> dict[str, Any]:
    """Start a deployment, inject a cause, and count the verdicts."""
    server = start(scenario, size, model)
    client = Client(server, size, scenario.answers, service, Path(os.environ[DELAY_FILE]))
    background = [asyncio.create_task(client.measure_lag())]
    try:
        for _ in range(HEALTHY // 2):
            await client.burst("h", 2)
        await scenario.inject(client)  # the first time is slower
        client.calls["c"].clear()
        until_s, windows = time.monotonic() + args.limit, list[tuple[float, float]]()
        background.append(asyncio.create_task(send_steadily(client)))
        while time.monotonic() < until_s and args.requests > sum(
            client.is_slowed(call) for call in client.calls["v"]
        ):
            began_s = time.monotonic()
            client.calm = len(windows) % 2 == 0 or len(client.calls["c"]) < CALM
            if client.calm:
                await scenario.inject(client)  # its new prompts are long ones, too
            client.calm = False
            await scenario.inject(client)
            windows.append((began_s, time.monotonic()))
            await asyncio.sleep(BETWEEN_S)
        background.pop().cancel()
        await asyncio.sleep(2.5)  # the stories come once a second
        stories = fetch_stories(server)
    finally:
        for task in background:
            task.cancel()
        server.stop()
    usual_s = [round(client.usual_s(kind), 3) for kind in "hv"]
    judged = Judged(scenario, client, windows, stories)
    if args.stories:
        groups = {"missed": judged.missed, "blamed": judged.blamed, "slowed": judged.slowed}
        kept_stories = {
            name: [(call, judged.late_s(call), stories[call.name]) for call in calls]
            for name, calls in groups.items()
        }
        Path(args.stories, f"{scenario.inject.__name__}.json").write_text(json.dumps(kept_stories))
    return count(judged, usual_s, args.show)


def waited_for_blocks(story: Story) -> bool:
    """Return whether a request waited for KV blocks."""
    return any((each["times"].get("kv_s") or 0.0) > LATE_S for each in story["attempts"])


def has_moved(story: Story) -> bool:
    """Return whether a request lost a worker."""
    return any(attempt["error"] for attempt in story["attempts"])


class Judged:
    """The requests of a scenario whose stories are kept, and what the verdict says of them."""

    def __init__(
        self,
        scenario: Scenario,
        client: Client,
        windows: list[tuple[float, float]],
        stories: dict[str, Story],
    ) -> None:
        self._scenario, self._client, self._windows = scenario, client, windows
        self.stories = stories
        calls = client.calls
        known = {k: [c for c in each if c.name in stories] for k, each in calls.items()}
        self.no_story = sum(len(each) - len(known[k]) for k, each in calls.items())
        self.slowed = [
            call
            for call in known["v"]
            if client.is_slowed(call)
            and (not scenario.needs_blocks or waited_for_blocks(stories[call.name]))
        ]
        self.beside = [call for call in known["h"] if self._is_beside(call)]
        healthy = known["c"] + [call for call in known["h"] if not self._is_beside(call)]
        in_time = [c for c in (*self.beside, *known["v"]) if client.is_in_time(c)]
        self.others = healthy + [c for c in in_time if not has_moved(stories[c.name])]
        self.missed = [call for call in self.slowed if not self._is_right(call)]
        causes = set(scenario.causes)
        self.blamed = [call for call in self.others if set(self.named(call)) & causes]

    def late_s(self, call: Call) -> float:
        """Return how much longer a request took than usual ones."""
        return call.seconds - self._client.usual_s(call.name[0])

    def named(self, call: Call) -> tuple[str, ...]:
        """Return the first causes of the verdict, as many as were injected."""
        causes = [cause["name"] for cause in self.stories[call.name]["causes"]]
        return tuple(causes[: len(self._scenario.causes)])

    def shares(self, calls: list[Call]) -> dict[str, int]:
        """Return how often each verdict was given."""
        counts = Counter(map(self.named, calls))
        return {", ".join(names): number for names, number in counts.most_common()}

    def _is_beside(self, call: Call) -> bool:
        ended_s = call.began_s + call.seconds
        return any(call.began_s < end and ended_s > begin for begin, end in self._windows)

    def _is_right(self, call: Call) -> bool:
        causes, wanted = self.named(call), self._scenario.causes
        if len(self.stories[call.name]["attempts"]) <= self._scenario.needs_moves:
            return bool(causes) and causes[0] in wanted
        return set(causes) == set(wanted)


def count(judged: Judged, usual_s: list[float], show: int) -> dict[str, Any]:
    """Count the verdicts on requests that were slowed, and on the others."""
    right = [call for call in judged.slowed if call not in judged.missed][:2]
    for title, calls in (("named", right), ("missed", judged.missed), ("blamed", judged.blamed)):
        for call in calls[:show]:
            late_s, verdict = judged.late_s(call), judged.stories[call.name]["verdict"]
            print(f"  {title} {judged.named(call)} {late_s:.2f} s late: {verdict}")
    slowed, others = len(judged.slowed), len(judged.others)
    return {
        "usual_s": usual_s,
        "slowed": slowed,
        "no_story": judged.no_story,
        "named": (slowed - len(judged.missed)) / max(1, slowed),
        "causes": judged.shares(judged.slowed),
        "others": others,
        "others_blamed": len(judged.blamed) / max(1, others),
        "others_causes": judged.shares(judged.others),
        "beside": judged.shares([c for c in judged.beside if judged.late_s(c) >= LATE_S]),
    }


def main() -> None:
    """Print a line for each cause, and check the targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder with a tokenizer")
    parser.add_argument("--causes", default="", help="names of scenarios, by comma")
    parser.add_argument("--scene", choices=SCENES, default="tuned")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each cause")
    parser.add_argument("--show", type=int, default=0, help="print so many verdicts")
    parser.add_argument("--stories", default="", help="a folder for the stories of each cause")
    args = parser.parse_args()
    names = args.causes.split(",") if args.causes else list(SCENARIOS)
    if not args.causes and args.scene == "native":
        names = list(NATIVE_SCENARIOS)
    targets, results = Targets(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            result = results[name] = asyncio.run(run(name, args, Path(folder)))
            print(name, json.dumps(result), flush=True)
            targets.at_least(f"{name}: named", result["named"], 0.95)
            targets.at_most(f"{name}: others blamed", result["others_blamed"], 0.02)
    targets.print_report(results, f"dynamo why, scene {args.scene}")
    raise SystemExit(targets.exit_code)


if __name__ == "__main__":
    main()
