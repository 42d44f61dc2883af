"""`dynamo kv`: show and empty the KV blocks of the workers, by tier."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.cli.workers.calls import (
    call_worker,
    find_discovery_url,
    find_instances,
    open_command_runtime,
)
from dynamo.core.errors import ConfigError, DynamoError, NotFound

if TYPE_CHECKING:
    from dynamo.core.settings import Settings
    from dynamo.inference.memory.tier_control import KvAnswer, TierStatus

CLEAR = "clear"
TITLES = (
    *("WORKER", "TIER", "BLOCKS", "CAPACITY", "BYTES", "HITS", "STORED", "EVICTED"),
    *("LOAD", "AGE", "PROBLEM"),
)

EXAMPLES = """\
  dynamo kv                             the tiers of every worker
  dynamo kv --worker worker-2 --json
  dynamo kv clear host                  forget the blocks in host memory
  dynamo kv clear all --worker worker-2"""


def parser() -> Parser:
    """Return the parser: what to do, the worker, and the settings of the deployment."""
    parser = Parser(
        "dynamo kv",
        "Show the KV blocks of each worker by tier: device, host memory, disk, shared store. Or "
        "empty a tier. HITS are blocks that prompts reused; LOAD is the predicted time to load "
        "one block; AGE is about how long a block stays.",
        EXAMPLES,
        usage="[clear host|disk|shared|all] [--worker WORKER] [--json] [FLAGS of dynamo run]",
    )
    parser.add_argument("action", nargs="?", choices=(CLEAR,), metavar=CLEAR, help="empty a tier")
    parser.add_argument("tier", nargs="?", metavar="TIER", help="host, disk, shared or all")
    parser.add_argument("--worker", metavar="WORKER", help="process or instance (default: all)")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    add_settings_flags(parser, shown=("runtime", "security"))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the tiers, or empty one."""
    args = parser().parse(arguments)
    if bool(args.action) != bool(args.tier):
        raise ConfigError("`clear` needs a tier", hint="dynamo kv clear host|disk|shared|all")
    settings = load_settings(args).settings
    url = find_discovery_url(settings)
    answers = asyncio.run(_ask_workers(settings, url, args.worker or "", args.tier or ""))
    if args.tier:
        for worker, answer in answers.items():
            print(f"{worker}: {answer.cleared} blocks of {args.tier} removed")
    elif args.json:
        print(format_tiers_json(answers))
    else:
        print(format_tiers_table(answers))
    return 0


async def _ask_workers(
    settings: Settings, url: str, worker: str, clear: str
) -> Mapping[str, KvAnswer]:
    """Call the workers, or one, and return their answers by instance id. Raises `NotFound` without
    a worker, and the last error if no worker answers."""
    from dynamo.inference.memory.tier_control import KV_ENDPOINT, KvRequest, decode_kv_answer

    payload = msgspec.msgpack.encode(KvRequest(clear))
    answers: dict[str, KvAnswer] = {}
    failure: DynamoError | None = None
    async with open_command_runtime(settings, url) as runtime:
        instances = await find_instances(runtime, KV_ENDPOINT)
        for name in sorted(instances):
            if worker and worker not in (name, name.rpartition("-")[0]):
                continue
            try:
                answers[name] = decode_kv_answer(
                    await call_worker(runtime, instances[name], payload)
                )
            except DynamoError as error:
                failure = error
                print(f"{name}: {error.message}", file=sys.stderr)
    if failure is not None and not answers:
        raise failure
    if not answers:
        names = ", ".join(sorted(instances))
        raise NotFound(
            f"there is no worker {worker!r}" if worker else "no worker is running there",
            hint=f"the workers are: {names}" if names else "`dynamo ps` lists all processes",
        )
    return answers


def format_tiers_json(answers: Mapping[str, KvAnswer]) -> str:
    """Return a JSON array with an object for each worker and tier."""
    rows = [
        {"worker": worker, **{name: getattr(tier, name) for name in tier.__struct_fields__}}
        for worker, answer in answers.items()
        for tier in answer.tiers
    ]
    return msgspec.json.encode(rows).decode()


def format_tiers_table(answers: Mapping[str, KvAnswer]) -> str:
    """Return a table with a row for each worker, data-parallel rank and tier."""
    rows = [
        _format_row(worker, tier) for worker, answer in answers.items() for tier in answer.tiers
    ]
    return "\n".join(format_table([TITLES, *rows]))


def _format_row(worker: str, tier: TierStatus) -> Sequence[str]:
    counts = (tier.blocks, tier.capacity_blocks)
    size = format_bytes(tier.blocks * tier.block_bytes)
    totals = (tier.hits, tier.stored, tier.evicted)
    return (
        f"{worker}/{tier.rank}" if tier.rank else worker,
        tier.tier,
        *map(str, counts),
        size,
        *map(str, totals),
        f"{tier.load_ms:.2g} ms" if tier.load_ms else "-",
        f"{tier.age_s:.0f} s",
        tier.problem or "-",
    )


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
