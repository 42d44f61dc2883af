"""`dynamo report FILE`: collect what helps to find a fault, without keys, prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, read_settings

EXAMPLES = """\
  dynamo report fault.tar.gz
  dynamo report fault.tar.gz --deployment http-8000 -f config.yaml"""


def parser() -> Parser:
    """Return the parser: the file, and the settings of the deployment."""
    parser = Parser(
        "dynamo report",
        "Write versions, settings, health, metrics, alerts, worst requests, stacks and last log "
        "lines of a running deployment to an archive, also while parts of it hang or are dead.",
        EXAMPLES,
        usage="FILE [--deployment NAME] [FLAGS of dynamo run]",
    )
    parser.add_argument("file", metavar="FILE", help="the archive to write (tar, gzip)")
    add_settings_flags(parser, shown=())
    return parser


def run(arguments: Sequence[str]) -> int:
    """Write the archive and print what is in it."""
    args = parser().parse(arguments)

    from dynamo.cli.stop import select_deployments
    from dynamo.operations.report import collect, write_archive
    from dynamo.runtime.deployment import live_deployments

    loaded = read_settings(args)
    running = live_deployments()
    name = loaded.settings.runtime.deployment or None
    chosen = select_deployments(running, name)[0] if running or name else None
    files = collect(chosen, loaded)
    write_archive(args.file, files)
    print(f"{args.file}: {len(files)} files, without keys, prompts and answers")
    for missing in files.get("missing.txt", "").splitlines():
        print(f"  missing: {missing}")
    return 0
