"""`dynamo console`: open the pages of a deployment's observer in a browser."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence

from dynamo.cli.parsing import DEPLOYMENT_HELP, Parser

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
    from dynamo.application.console.handler import CONSOLE_PATH
    from dynamo.cli.stop import find_server_url

    args = parser().parse(arguments)
    url = f"{find_server_url(args.deployment, ('observer',))}{CONSOLE_PATH}"
    print(url, flush=True)
    if not args.print and not webbrowser.open(url):
        print("no browser is found here: open it in one")
    return 0
