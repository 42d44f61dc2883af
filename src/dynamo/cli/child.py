"""`dynamo _child ROLE`: a process of a deployment, started by the supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.parsing import Parser


def parser() -> Parser:
    """Return the parser: the role."""
    parser = Parser(
        "dynamo _child", "Run a process of a deployment with settings from standard input."
    )
    parser.add_argument("role", help="frontend, router, worker or service")
    parser.add_argument(
        "--fork-server", action="store_true", help="fork processes of the role by orders"
    )
    parser.add_argument(
        "--snapshot", action="store_true", help="load a model, and wait to be saved and restored"
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run until the supervisor ends the process."""
    args = parser().parse(arguments)

    from dynamo.services.deployment.launch import become_child, run_child
    from dynamo.services.deployment.user_service import USER_SERVICE_ROLE, run_user_service

    if args.snapshot:
        from dynamo.services.deployment.preload import preload_model

        become_child(args.role, preload_model)
    if args.fork_server:
        become_child(args.role)
    if args.role == USER_SERVICE_ROLE:
        return run_user_service()
    return run_child(args.role)
