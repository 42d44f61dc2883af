"""`dynamo roles`: change what a running worker computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.cli.workers.calls import (
    call_worker,
    find_discovery_url,
    find_instances,
    open_command_runtime,
    select_worker,
    unregistered_error,
)
from dynamo.core.settings import Settings
from dynamo.core.values import ROLES_BY_NAME

EXAMPLES = """\
  dynamo roles worker-2 prefill       prompts of other workers only
  dynamo roles worker-2 both
  dynamo roles worker-2 both -f serve.yaml      a deployment with etcd"""


def parser() -> Parser:
    """Return the parser: the worker, its role and the settings of the deployment."""
    parser = Parser(
        "dynamo roles",
        "Change what a running worker computes. Its answers move if it is to prefill. A restarted "
        "worker has the role of the settings again.",
        EXAMPLES,
        usage="WORKER prefill|decode|both [FLAGS of dynamo run]",
    )
    parser.add_argument(
        "worker", metavar="WORKER", help="name or instance of the process in `dynamo ps`"
    )
    parser.add_argument("role", choices=list(ROLES_BY_NAME), help="what the worker computes")
    add_settings_flags(parser, shown=("runtime", "security"))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Change the role of a worker."""
    args = parser().parse(arguments)
    settings = load_settings(args).settings
    deployment, instance = select_worker(settings, args.worker)
    url = find_discovery_url(settings, deployment)
    asyncio.run(_set_role(settings, url, instance, args.role))
    print(f"{args.worker} is {args.role}")
    return 0


async def _set_role(settings: Settings, url: str, instance_id: str, role: str) -> None:
    async with open_command_runtime(settings, url) as runtime:
        instance = (await find_instances(runtime, "set_role")).get(instance_id)
        if instance is None:
            raise unregistered_error(instance_id, url)
        await call_worker(runtime, instance, role.encode())
