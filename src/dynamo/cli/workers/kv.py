"""`dynamo kv`: show and empty the KV blocks of the workers, by tier, and pin prompts."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable, NotFound
from dynamo.core.kv_events import worker_name
from dynamo.core.settings.units import parse_seconds

if TYPE_CHECKING:
    from dynamo.core.settings import Settings
    from dynamo.inference.memory.tier_control import KvAnswer, PinRequest, TierStatus
    from dynamo.models.card import ModelCard
    from dynamo.runtime.calls.instances import Instance
    from dynamo.runtime.distributed import DistributedRuntime


class PromptText(msgspec.Struct, frozen=True):
    """A prompt to pin in `tier`. `is_chat`: the text is the system message of conversations."""

    tier: str
    text: str
    is_chat: bool
    salt: str
    ttl_s: float


def read_prompt(args: argparse.Namespace) -> PromptText:
    """Return the prompt of the command line. Raises `ConfigError`."""
    if (args.text is None) == (args.prompt_file is None):
        raise ConfigError(
            "`pin` needs one prompt",
            hint="dynamo kv pin host|disk TEXT, or --prompt-file FILE",
        )
    try:
        ttl_s = parse_seconds(args.ttl)
        text = args.text if args.prompt_file is None else args.prompt_file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "give a file with UTF-8 text"
        raise ConfigError(f"{args.prompt_file} cannot be read: {error}", hint=hint) from None
    except ValueError as error:
        raise ConfigError(f"--ttl {args.ttl}: {error}", param="--ttl") from None
    return PromptText(args.target, text, args.chat, args.salt, ttl_s)


async def encode_pin(
    runtime: DistributedRuntime, instance: Instance, prompt: PromptText
) -> PinRequest:
    """Return the request for a worker, in the tokens of its model. Raises `ModelUnavailable`."""
    from dynamo.inference.memory.tier_control import PinRequest
    from dynamo.models.tokenization.tokenizer import load_tokenizer
    from dynamo.services.model_store.store import ensure_file

    card = await _find_card(runtime, instance)
    file = await ensure_file(runtime, card.tokenizer_file, instance.namespace)
    tokenizer = await asyncio.to_thread(load_tokenizer, file)
    text = _render(card, prompt.text) if prompt.is_chat else prompt.text
    ids = tokenizer.encode(text)
    if not prompt.is_chat:
        ids = tokenizer.prompt_affixes[0] + ids
    return PinRequest(prompt.tier, ids, prompt.salt, prompt.ttl_s)


def describe_pin(answer: KvAnswer, tier: str) -> str:
    """Return what a worker keeps after a pin."""
    pins = [pin for status in answer.tiers for pin in status.pins if status.tier == tier]
    pin = next(pin for pin in pins if pin.pin == answer.pin)
    text = f"pin {pin.pin}: {pin.blocks} blocks stay in {tier}, {pin.held} are there already"
    return f"{text}; ends in {pin.ttl_s:.0f} s" if pin.ttl_s else text


async def _find_card(runtime: DistributedRuntime, instance: Instance) -> ModelCard:
    from dynamo.models.card import ModelCard
    from dynamo.services.catalogue import models_prefix

    records = await runtime.discovery.get(models_prefix(instance.namespace))
    for key, record in records.items():
        if key.rpartition("/")[2] == instance.id:
            return msgspec.json.decode(record, type=ModelCard)
    raise ModelUnavailable(
        f"the worker {instance.id} has not announced its model",
        hint="try again when `dynamo ps` shows it as ready",
    )


def _render(card: ModelCard, text: str) -> str:
    """Return the beginning of every conversation that has `text` as its system message."""
    from dynamo.models.chat_template import ChatTemplate

    messages = [{"role": "system", "content": text}]
    return ChatTemplate.of(card).render(messages, add_generation_prompt=False)


CLEAR, PIN, UNPIN = "clear", "pin", "unpin"
WANTED = {
    CLEAR: "dynamo kv clear host|disk|shared|all",
    PIN: "dynamo kv pin host|disk TEXT, or --prompt-file FILE",
    UNPIN: "dynamo kv unpin PIN|all",
}
TITLES = (
    *("WORKER", "TIER", "BLOCKS", "CAPACITY", "BYTES", "HITS", "STORED", "EVICTED"),
    *("PINNED", "LOAD", "AGE", "PROBLEM"),
)

EXAMPLES = """\
  dynamo kv                             the tiers of every worker
  dynamo kv --worker worker-2 --json
  dynamo kv clear host                  forget the blocks in host memory
  dynamo kv clear all --worker worker-2
  dynamo kv pin host --chat "You are a lawyer." --ttl 8h
  dynamo kv pin disk --prompt-file contract.txt
  dynamo kv unpin all"""


def parser() -> Parser:
    """Return the parser: what to do, the worker, and the settings of the deployment."""
    parser = Parser(
        "dynamo kv",
        "Show the KV blocks of each worker by tier: device, host memory, disk, shared store. Or "
        "empty a tier, or pin a prompt, whose blocks then stay in a tier. HITS are blocks that "
        "prompts reused; PINNED are blocks that are not evicted, once they are there; LOAD is the "
        "predicted time to load one block; AGE is about how long a block stays.",
        EXAMPLES,
        usage="[clear TIER | pin host|disk TEXT | unpin PIN|all] [--worker WORKER] [--json] "
        "[FLAGS of dynamo run]",
    )
    add = parser.add_argument
    add("action", nargs="?", choices=tuple(WANTED), metavar="clear|pin|unpin", help="what to do")
    add("target", nargs="?", metavar="TIER|PIN", help="host, disk, shared or all; or a pin")
    add("text", nargs="?", metavar="TEXT", help="the prompt to pin, from its first word on")
    add("--prompt-file", metavar="FILE", type=Path, help="the prompt to pin, as UTF-8 text")
    add("--chat", action="store_true", help="the prompt is a system message, not a bare text")
    add("--salt", default="", help="cache_salt of the requests whose blocks are pinned")
    add(
        "--ttl", metavar="TIME", default="0", help="end the pin after e.g. 90s, 8h (default: never)"
    )
    add("--worker", metavar="WORKER", help="process or instance (default: all)")
    add("--json", action="store_true", help="print a JSON array")
    add_settings_flags(parser, shown=("runtime", "security"))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the tiers, empty one, or pin a prompt."""
    args = parser().parse(arguments)
    if args.action and not args.target:
        raise ConfigError(f"`{args.action}` needs a target", hint=WANTED[args.action])
    prompt = read_prompt(args) if args.action == PIN else None
    settings = load_settings(args).settings
    url = find_discovery_url(settings)
    answers = asyncio.run(_ask_workers(settings, url, args, prompt))
    if args.action == PIN:
        for worker, answer in answers.items():
            print(f"{worker}: {describe_pin(answer, args.target)}")
    elif args.action == UNPIN:
        for worker, answer in answers.items():
            print(f"{worker}: {answer.unpinned} pins ended")
    elif args.action == CLEAR:
        for worker, answer in answers.items():
            print(f"{worker}: {answer.cleared} blocks of {args.target} removed")
    elif args.json:
        print(format_tiers_json(answers))
    else:
        print(format_tiers_table(answers))
    return 0


async def _ask_workers(
    settings: Settings, url: str, args: argparse.Namespace, prompt: PromptText | None
) -> Mapping[str, KvAnswer]:
    """Call the workers, or one, and return their answers by instance id. Raises `NotFound` without
    a worker, and the last error if no worker answers."""
    from dynamo.inference.memory.tier_control import KV_ENDPOINT, KvRequest, decode_kv_answer

    worker, target = args.worker or "", args.target or ""
    request = KvRequest(
        clear=target if args.action == CLEAR else "", unpin=target if args.action == UNPIN else ""
    )
    answers: dict[str, KvAnswer] = {}
    failure: DynamoError | None = None
    async with open_command_runtime(settings, url) as runtime:
        instances = await find_instances(runtime, KV_ENDPOINT)
        for name in sorted(instances):
            if worker and worker not in (name, name.rpartition("-")[0]):
                continue
            try:
                if prompt is not None:
                    request = KvRequest(pin=await encode_pin(runtime, instances[name], prompt))
                payload = msgspec.msgpack.encode(request)
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
    rows = []
    for worker, answer in answers.items():
        has_ranks = any(tier.rank for tier in answer.tiers)
        for tier in answer.tiers:
            name = worker_name(worker, tier.rank if has_ranks else None)
            rows.append(_format_row(name, tier))
    return "\n".join(format_table([TITLES, *rows]))


def _format_row(worker: str, tier: TierStatus) -> Sequence[str]:
    counts = (tier.blocks, tier.capacity_blocks)
    size = format_bytes(tier.blocks * tier.block_bytes)
    totals = (tier.hits, tier.stored, tier.evicted)
    return (
        worker,
        tier.tier,
        *map(str, counts),
        size,
        *map(str, totals),
        str(tier.pinned_blocks),
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
