"""`dynamo sleep` and `dynamo wake`: let workers give their memory back, and serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.cli.workers.calls import (
    call_worker,
    find_discovery_url,
    find_instances,
    open_command_runtime,
)
from dynamo.core.errors import NotFound, nearest_name_hint
from dynamo.core.settings import Settings
from dynamo.runtime.sleep import (
    MODEL_KEY,
    SLEEP_ENDPOINT,
    SLEEP_LEVELS,
    SleepAnswer,
    SleepOrder,
    encode_sleep_order,
)

if TYPE_CHECKING:
    from dynamo.runtime.calls.instances import Instance

LEVEL_HELP = (
    "1: weights stay in the host's memory, 2: they are loaded again at the end (default: 1)"
)
WAKE_S = 600.0
"""A worker may load its weights for so long, and requests end before within the drain time."""


class SleepCommand(msgspec.Struct, frozen=True):
    """A command that sends an order to one worker, or to all of a model."""

    name: str
    description: str
    examples: str

    def parser(self) -> Parser:
        """Return the parser: the worker or model, the level, the settings of the deployment."""
        parser = Parser(
            f"dynamo {self.name}",
            self.description,
            self.examples,
            usage="WORKER|MODEL [FLAGS of dynamo run]",
        )
        parser.add_argument(
            "target", metavar="WORKER|MODEL", help="worker in `dynamo ps`, or a model: all of its"
        )
        if self is SLEEP:
            parser.add_argument(
                "--level", type=int, choices=SLEEP_LEVELS, default=1, help=LEVEL_HELP
            )
        add_settings_flags(parser, shown=("runtime", "security"))
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Send the order, and say what became of each worker."""
        args = self.parser().parse(arguments)
        settings = load_settings(args).settings
        url = find_discovery_url(settings)
        order = SleepOrder(args.level if self is SLEEP else 0)
        asyncio.run(_send_orders(settings, url, args.target, order))
        return 0


async def _send_orders(settings: Settings, url: str, target: str, order: SleepOrder) -> None:
    """Send an order to each worker of that name, one after the other. Raises the first error."""
    async with open_command_runtime(settings, url) as runtime:
        instances = _select(await find_instances(runtime, SLEEP_ENDPOINT), target)
        timeout_s = settings.runtime.drain_s + WAKE_S
        for name, instance in instances.items():
            payload = encode_sleep_order(order)
            answer = await call_worker(runtime, instance, payload, timeout_s)
            print(_describe(name, msgspec.json.decode(answer, type=SleepAnswer)), flush=True)


def _select(instances: Mapping[str, Instance], target: str) -> Mapping[str, Instance]:
    """Return the workers that are called `target` or serve the model `target`, by name. Raises
    `NotFound`."""
    named = {instance_id: instance_id.rpartition("-")[0] for instance_id in instances}
    chosen = {
        named[instance_id]: instance
        for instance_id, instance in instances.items()
        if target in (instance_id, named[instance_id], instance.capabilities.get(MODEL_KEY))
    }
    if not chosen:
        models = {str(each.capabilities.get(MODEL_KEY)) for each in instances.values()}
        hint = nearest_name_hint(target, sorted({*named.values(), *models}))
        raise NotFound(f"no worker that can sleep has the name or the model {target!r}", hint=hint)
    return dict(sorted(chosen.items()))


def _describe(name: str, answer: SleepAnswer) -> str:
    if not answer.changed:
        return (
            f"{name} sleeps already, at level {answer.level}"
            if answer.level
            else f"{name} is awake"
        )
    took = f"after {answer.seconds:.2f} s"
    return (
        f"{name} sleeps at level {answer.level} {took}" if answer.level else f"{name} serves {took}"
    )


SLEEP = SleepCommand(
    "sleep",
    "Let workers give the memory of their weights and KV back. Their requests move to other "
    "workers or end first. `dynamo wake`, or a request that finds no worker awake, wakes them.",
    """\
  dynamo sleep worker-2
  dynamo sleep smollm2:135m --level 2     all workers of a model, without their weights""",
)
WAKE = SleepCommand(
    "wake",
    "Let sleeping workers serve again.",
    """\
  dynamo wake worker-2
  dynamo wake smollm2:135m                all workers of a model""",
)
