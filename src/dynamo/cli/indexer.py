"""`dynamo indexer`: run an index of the workers' caches for several routers."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings

EXAMPLES = """\
  dynamo indexer --deployment http-8000
  dynamo indexer --deployment http-8000 --index.file ~/index.bin
  dynamo run out=mock --workers 4 --router-mode kv --shared-index"""


def parser() -> Parser:
    """Return the parser: the settings of the deployment."""
    parser = Parser(
        "dynamo indexer",
        "Keep an index of the workers' cached blocks for the routers of a deployment that run with "
        "--shared-index. `dynamo ps` lists the status port.",
        EXAMPLES,
        usage="--deployment NAME [FLAGS of dynamo run]",
    )
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    settings = load_settings(parser().parse(arguments)).settings

    from dynamo.services.indexer import run_indexer

    return run_indexer(settings)
