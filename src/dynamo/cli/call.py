"""`dynamo call`: ask one endpoint of a running deployment, from a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, NoWorkers
from dynamo.core.settings import Settings

WAIT_S = 5.0

EXAMPLES = """\
  dynamo call Greeter.greet '{"name": "Ann"}'
  dynamo call production.Greeter.greet '{"name": "Ann"}' --deployment Greeter
  dynamo call Processor.chat/completions - < request.json"""


def parser() -> Parser:
    """The endpoint, the request, and where it runs."""
    made = Parser(
        "dynamo call",
        "Call one endpoint of a service and print what it answers: JSON, a line an item.",
        EXAMPLES,
    )
    made.add_argument("endpoint", metavar="[NAMESPACE.]SERVICE.ENDPOINT", help="what to call")
    made.add_argument("request", nargs="?", help="JSON; - reads standard input")
    made.add_argument("--deployment", metavar="NAME", help="its name or port, where several run")
    made.add_argument("--discovery", metavar="URL", help="a discovery plane of yours")
    return made


def run(arguments: Sequence[str]) -> int:
    """Call and print."""
    found = parser().parse(arguments)
    text = sys.stdin.read() if found.request == "-" else found.request or "null"
    try:
        request = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the request is not JSON: {error}", hint='e.g. \'{"name": "Ann"}\''
        ) from None
    url = found.discovery or _discovery(found.deployment)
    asyncio.run(_call(url, found.endpoint, request))
    return 0


async def _call(url: str, name: str, request: Any) -> None:
    from msgspec.structs import replace

    from dynamo.runtime import DistributedRuntime

    settings = Settings()
    settings = replace(settings, runtime=replace(settings.runtime, discovery=url))
    if name.partition("/")[0].count(".") == 1:
        name = f"{settings.runtime.namespace}.{name}"
    async with await DistributedRuntime.create(settings, role="call") as runtime:
        client = await runtime.endpoint(name).client()
        try:
            await client.wait_for_instances(timeout_s=WAIT_S)
        except NoWorkers:
            raise NoWorkers(f"nobody serves {name}", hint=await _served(runtime)) from None
        async with client.generate(request) as answers:
            async for item in answers:
                print(msgspec.json.encode(item).decode(), flush=True)


async def _served(runtime: Any) -> str:
    """What could be called instead."""
    from dynamo.runtime.instances import decode_instance

    records = await runtime.discovery.get("/")
    found = [
        decode_instance(key, value)
        for key, value in records.items()
        if key.split("/")[2:3] == ["workers"]
    ]
    names = {f"{one.namespace}.{one.component}.{one.endpoint}" for one in found if one is not None}
    return f"served: {', '.join(sorted(names))}" if names else "nothing is served there"


def _discovery(which: str | None) -> str:
    """The discovery plane of the deployment meant. Raises `ConfigError`, `NotFound`."""
    from dynamo.cli.stop import choose
    from dynamo.runtime.deployment import live_deployments

    (deployment,) = choose(live_deployments(), which)
    return deployment.discovery_url
