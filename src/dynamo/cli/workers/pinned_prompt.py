"""The prompt of `dynamo kv pin`: read, rendered and tokenised as the worker's frontends do it."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

import msgspec

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings.units import parse_seconds

if TYPE_CHECKING:
    from dynamo.inference.memory.tier_control import KvAnswer, PinRequest
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
