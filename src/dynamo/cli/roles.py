"""`dynamo roles`: change what a running worker computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, NotFound
from dynamo.core.values import ROLES_BY_NAME

if TYPE_CHECKING:
    from dynamo.core.settings import Settings

TIMEOUT_S = 10.0
EXAMPLES = """\
  dynamo roles worker-2 prefill       prompts of other workers only
  dynamo roles worker-2 both"""


def parser() -> Parser:
    """Return the parser: the worker, its role and the deployment."""
    parser = Parser(
        "dynamo roles",
        "Change what a running worker computes. Its requests in flight end there. A restarted "
        "worker has the role of the settings again.",
        EXAMPLES,
    )
    parser.add_argument("worker", metavar="WORKER", help="name of the process in `dynamo ps`")
    parser.add_argument("role", choices=list(ROLES_BY_NAME), help="what the worker computes")
    parser.add_argument(
        "--deployment", metavar="NAME|PORT", help="deployment, if several run (see `dynamo ps`)"
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Change the role of a worker."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments
    from dynamo.runtime.environment import environment_settings
    from dynamo.runtime.planes import planes_of

    args = parser().parse(arguments)
    (deployment,) = select_deployments(live_deployments(), args.deployment)
    workers = {
        process.name: process.instance
        for process in deployment.live_processes()
        if process.role == "worker" or process.role.endswith("_worker")
    }
    if args.worker not in workers:
        raise NotFound(
            f"{deployment.id} has no worker {args.worker!r}",
            hint=f"its workers: {', '.join(sorted(workers))}"
            if workers
            else "`dynamo ps` lists all",
        )
    settings = environment_settings()
    url = planes_of(settings).discovery
    if url.startswith("file:"):
        url = deployment.discovery_url
    asyncio.run(_set_role(settings, url, workers[args.worker], args.role))
    print(f"{args.worker} is {args.role}")
    return 0


async def _set_role(settings: Settings, url: str, instance_id: str, role: str) -> None:
    from msgspec.structs import replace

    from dynamo.core.context import Context
    from dynamo.runtime import DistributedRuntime

    settings = replace(settings, runtime=replace(settings.runtime, discovery=url))
    async with await DistributedRuntime.create(settings, role="roles") as runtime:
        client = await runtime.namespace().component("worker").endpoint("set_role").client()
        instance = client.instances.get(instance_id)
        if instance is None:
            raise ConfigError(
                f"the worker {instance_id} is not registered in {url}",
                hint="set the environment of the deployment, such as DYNAMO_ETCD_ENDPOINTS",
            )
        async with asyncio.timeout(TIMEOUT_S):
            await client.collect(instance, role.encode(), Context(request_id="roles"))
