"""`dynamo call`: call one endpoint of a running deployment."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, NotFound, NoWorkers
from dynamo.core.settings import Settings
from dynamo.runtime.environment import environment_settings

if TYPE_CHECKING:
    from dynamo.communication.discovery import Discovery
    from dynamo.runtime.deployment import Deployment

INSTANCES_TIMEOUT_S = 5.0

EXAMPLES = """\
  dynamo call Greeter.greet '{"name": "Ann"}'
  dynamo call production.Greeter.greet '{"name": "Ann"}' --deployment Greeter
  dynamo call Processor.chat/completions - < request.json"""


def parser() -> Parser:
    """Return the parser: the endpoint, the request and the deployment."""
    parser = Parser(
        "dynamo call",
        "Call one endpoint of a service and print its response items, one JSON value a line.",
        EXAMPLES,
    )
    parser.add_argument("endpoint", metavar="[NAMESPACE.]SERVICE.ENDPOINT", help="endpoint to call")
    parser.add_argument("request", nargs="?", help="JSON; - reads standard input")
    parser.add_argument(
        "--deployment", metavar="NAME", help="name or port of the deployment, if several serve it"
    )
    parser.add_argument("--discovery", metavar="URL", help="discovery plane to use instead")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Send the request and print the response items."""
    args = parser().parse(arguments)
    text = sys.stdin.read() if args.request == "-" else args.request or "null"
    try:
        request = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the request is not JSON: {error}", hint='e.g. \'{"name": "Ann"}\''
        ) from None
    settings = environment_settings()
    name = args.endpoint
    if name.partition("/")[0].count(".") == 1:
        name = f"{settings.runtime.namespace}.{name}"
    if args.discovery:
        _check_discovery_folder(args.discovery)
    url = args.discovery or ("" if args.deployment else _configured_discovery_server(settings))
    asyncio.run(
        _call(settings, url or _deployment_discovery_url(args.deployment, name), name, request)
    )
    return 0


def _check_discovery_folder(url: str) -> None:
    """Raise `NotFound` for a `file:` plane without a folder, which a call must not create."""
    from dynamo.communication.discovery.file import folder_of

    if url.startswith("file:") and not folder_of(url).is_dir():
        raise NotFound(
            f"--discovery {url}: there is no folder {folder_of(url)}",
            hint="`dynamo ps` lists the running deployments; --deployment NAME calls one",
        )


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
            hint = f"served: {names}" if names else "no endpoint is served there"
            raise NoWorkers(error.message, hint=hint) from None
        async with client.generate(request) as items:
            async for item in items:
                print(msgspec.json.encode(item).decode(), flush=True)


async def _list_endpoints(discovery: Discovery) -> set[str]:
    """Return the full names of the registered endpoints."""
    from dynamo.runtime.calls.instances import decode_instance

    records = (await discovery.get("/")).items()
    workers = [record for record in records if record[0].split("/")[2:3] == ["workers"]]
    instances = [item for record in workers if (item := decode_instance(*record)) is not None]
    return {f"{item.namespace}.{item.component}.{item.endpoint}" for item in instances}


def _configured_discovery_server(settings: Settings) -> str:
    """Return the discovery URL of the environment if it names a server, else an empty string."""
    from dynamo.runtime.planes import planes_of

    url = planes_of(settings).discovery
    return "" if url.startswith("file:") else url


def _deployment_discovery_url(deployment_name: str | None, endpoint: str) -> str:
    """Return the discovery URL of the named deployment, else of the one that serves `endpoint`.
    Raises `ConfigError` and `NotFound`."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    running = live_deployments()
    if deployment_name is None and len(running) > 1:
        running = asyncio.run(_deployments_serving(running, endpoint))
    (deployment,) = select_deployments(running, deployment_name)
    return deployment.discovery_url


async def _deployments_serving(
    running: Sequence[Deployment], endpoint: str
) -> Sequence[Deployment]:
    """Return the deployments that serve `endpoint`. Raises `NoWorkers` if there are none."""
    from dynamo.communication.discovery import open_discovery

    serving, endpoints = [], set()
    for deployment in running:
        discovery = await open_discovery(deployment.discovery_url)
        try:
            served = await _list_endpoints(discovery)
        finally:
            await discovery.close()
        endpoints |= served
        if endpoint in served:
            serving.append(deployment)
    if not serving:
        raise NoWorkers(
            f"none of the {len(running)} running deployments serves {endpoint}",
            hint=f"served: {', '.join(sorted(endpoints))}",
        )
    return serving
