"""`dynamo call`: ask one endpoint of a running deployment, from a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, NoWorkers
from dynamo.core.settings import Settings, resolve_settings

if TYPE_CHECKING:
    from dynamo.communication.discovery import Discovery
    from dynamo.runtime.deployment import Deployment

INSTANCES_TIMEOUT_S = 5.0

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
    made.add_argument(
        "--deployment", metavar="NAME", help="its name or port, where several serve it"
    )
    made.add_argument("--discovery", metavar="URL", help="a discovery plane of yours")
    return made


def run(arguments: Sequence[str]) -> int:
    """Call and print."""
    found = parser().parse(arguments)
    text = sys.stdin.read() if found.request == "-" else found.request or "null"
    try:
        request = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the request is not JSON: {error}", hint='e.g. \'{"name": "Ann"}\''
        ) from None
    settings = resolve_settings(environ=os.environ).settings
    name = found.endpoint
    if name.partition("/")[0].count(".") == 1:
        name = f"{settings.runtime.namespace}.{name}"
    url = found.discovery or ("" if found.deployment else _configured_discovery_server(settings))
    asyncio.run(
        _call(settings, url or _deployment_discovery_url(found.deployment, name), name, request)
    )
    return 0


async def _call(settings: Settings, url: str, name: str, request: Any) -> None:
    from msgspec.structs import replace

    from dynamo.runtime import DistributedRuntime

    settings = replace(settings, runtime=replace(settings.runtime, discovery=url))
    async with await DistributedRuntime.create(settings, role="call") as runtime:
        client = await runtime.endpoint(name).client()
        try:
            await client.wait_for_instances(timeout_s=INSTANCES_TIMEOUT_S)
        except NoWorkers as error:
            names = ", ".join(sorted(await _list_endpoints(runtime.discovery)))
            hint = f"served: {names}" if names else "nothing is served there"
            raise NoWorkers(error.message, hint=hint) from None
        async with client.generate(request) as answers:
            async for item in answers:
                print(msgspec.json.encode(item).decode(), flush=True)


async def _list_endpoints(discovery: Discovery) -> set[str]:
    """What could be called there."""
    from dynamo.runtime.calls.instances import decode_instance

    records = await discovery.get("/")
    found = [
        decode_instance(key, value)
        for key, value in records.items()
        if key.split("/")[2:3] == ["workers"]
    ]
    return {f"{one.namespace}.{one.component}.{one.endpoint}" for one in found if one is not None}


def _configured_discovery_server(settings: Settings) -> str:
    """The discovery plane that the environment names, if it is a server."""
    from dynamo.runtime.planes import planes_of

    url = planes_of(settings).discovery
    return "" if url.startswith("file:") else url


def _deployment_discovery_url(which: str | None, name: str) -> str:
    """The discovery plane of the deployment meant: where several run, of the one that serves
    `name`. Raises `ConfigError`, `NotFound`."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    running = live_deployments()
    if which is None and len(running) > 1:
        running = asyncio.run(_deployments_serving(running, name))
    (deployment,) = select_deployments(running, which)
    return deployment.discovery_url


async def _deployments_serving(running: Sequence[Deployment], name: str) -> Sequence[Deployment]:
    """Those that serve it. Raises `NoWorkers` where none does."""
    from dynamo.communication.discovery import open_discovery

    found, names = [], set()
    for deployment in running:
        discovery = await open_discovery(deployment.discovery_url)
        try:
            served = await _list_endpoints(discovery)
        finally:
            await discovery.close()
        names |= served
        if name in served:
            found.append(deployment)
    if not found:
        raise NoWorkers(
            f"none of the {len(running)} deployments that run serves {name}",
            hint=f"served: {', '.join(sorted(names))}",
        )
    return found
