"""`dynamo _child ROLE`: one process of a deployment, started by the supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.parsing import Parser


def parser() -> Parser:
    """One word: the role."""
    made = Parser("dynamo _child", "One process of a deployment; settings come on standard input.")
    made.add_argument("role", help="frontend, router, worker or service")
    return made


def run(arguments: Sequence[str]) -> int:
    """Run until the supervisor ends it."""
    found = parser().parse(arguments)

    from dynamo.services.deployment.launch import run_child
    from dynamo.services.deployment.user_service import USER_SERVICE_ROLE, run_user_service

    if found.role == USER_SERVICE_ROLE:
        return run_user_service()
    return run_child(found.role)
