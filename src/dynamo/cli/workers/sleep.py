"""`dynamo sleep` and `dynamo wake`: let workers give their memory back, and serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from operator import attrgetter
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
from dynamo.core.errors import ConfigError, NotFound, nearest_name_hint
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
        order = SleepOrder(args.level if self is SLEEP else 0)
        asyncio.run(_send_orders(settings, args.target, order))
        return 0


async def _send_orders(settings: Settings, target: str, order: SleepOrder) -> None:
    """Send an order to each worker of that name, one after the other. Raises the first error."""
    url, chosen = await _select(settings, target)
    timeout_s = settings.runtime.drain_s + WAKE_S
    async with open_command_runtime(settings, url) as runtime:
        for name, instance in chosen.items():
            payload = encode_sleep_order(order)
            answer = await call_worker(runtime, instance, payload, timeout_s)
            decoded = msgspec.json.decode(answer, type=SleepAnswer)
            print(_describe(name, decoded, order.level), flush=True)


async def _select(settings: Settings, target: str) -> tuple[str, Mapping[str, Instance]]:
    """Return the discovery plane and by name the workers there that are called `target`, or serve
    that model. Raises `NotFound`, and `ConfigError` if several deployments have some."""
    known: set[str] = set()
    matches: dict[str, Mapping[str, Instance]] = {}
    for url in _discovery_urls(settings):
        async with open_command_runtime(settings, url) as runtime:
            instances = (await find_instances(runtime, SLEEP_ENDPOINT)).values()
        names = {each.id: (each.id.rpartition("-")[0], _model(each)) for each in instances}
        known.update(name for pair in names.values() for name in pair)
        if matching := [each for each in instances if target in (each.id, *names[each.id])]:
            matches[url] = {
                names[each.id][0]: each for each in sorted(matching, key=attrgetter("id"))
            }
    if not matches:
        hint = nearest_name_hint(target, sorted(known))
        raise NotFound(
            f"no running worker that can sleep has the name or the model {target!r}", hint=hint
        )
    if len(matches) > 1:
        raise ConfigError(
            f"several deployments have workers that {target!r} names",
            hint="--deployment names one; `dynamo ps` lists them",
        )
    return next(iter(matches.items()))


def _discovery_urls(settings: Settings) -> Sequence[str]:
    """Return the discovery plane that the settings name, or those of all running deployments."""
    from dynamo.runtime.deployment import live_deployments
    from dynamo.runtime.planes import planes_of

    named = settings.runtime.discovery or settings.runtime.deployment
    local = not named and planes_of(settings).discovery.startswith("file:")
    running = live_deployments() if local else ()
    return [each.discovery_url for each in running] or [find_discovery_url(settings)]


def _model(instance: Instance) -> str:
    return str(instance.capabilities.get(MODEL_KEY))


def _describe(name: str, answer: SleepAnswer, level: int) -> str:
    if not answer.changed and answer.level:
        hint = "" if answer.level == level else f"; wake it first, to let it sleep at level {level}"
        return f"{name} sleeps already, at level {answer.level}{hint}"
    if not answer.changed:
        return f"{name} is awake"
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
