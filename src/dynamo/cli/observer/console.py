"""`dynamo console`: open the pages of a deployment's observer in a browser."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.parsing import DEPLOYMENT_HELP, Parser
from dynamo.cli.router import open_page

EXAMPLES = """\
  dynamo console
  dynamo console --print
  dynamo console --deployment 8000"""


def parser() -> Parser:
    """Return the parser: the deployment, and whether to open its page."""
    parser = Parser(
        "dynamo console",
        "Open the console of a deployment of this user on this host: its pace, workers and\n"
        "requests, and why these took long. The console changes nothing.",
        EXAMPLES,
    )
    parser.add_argument("--deployment", metavar="NAME", help=DEPLOYMENT_HELP)
    parser.add_argument("--print", action="store_true", help="print the URL only")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the URL, and open it where there is a browser."""
    from dynamo.cli.stop import find_server_url

    args = parser().parse(arguments)
    return open_page(find_server_url(args.deployment, ("observer",)), opens=not args.print)
