"""`dynamo engines`: which engines serve a model on this machine, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.settings import SourcedValue

if TYPE_CHECKING:
    from dynamo.inference.engines.choice import EngineOffer

EXAMPLES = """\
  dynamo engines                        for the default model
  dynamo engines ./model.gguf
  dynamo engines ./folder --workers 2 --json"""


def parser() -> Parser:
    """Return the parser: the model, `--json` and the settings of a deployment."""
    parser = Parser(
        "dynamo engines",
        "List the engines in the order in which `dynamo run MODEL` tries them: whether each serves "
        "the model on this machine, why not, and the command that serves it or installs the "
        "engine. Only the headers of the model's files are read.",
        EXAMPLES,
        usage="[MODEL] [--json] [FLAGS of dynamo run]",
    )
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="default: the default model"
    )
    parser.add_argument("--json", action="store_true", help="one JSON array")
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the engines. Returns 1 if none that is installed serves the model."""
    args = parser().parse(arguments)
    extra = {"model.path": SourcedValue(args.model, "argument MODEL")} if args.model else {}
    settings = load_settings(args, extra=extra).settings

    from dynamo.inference.engines.choice import ON_REQUEST, engine_offers
    from dynamo.inference.engines.model_facts import read_model_facts

    facts = read_model_facts(settings.model.path)
    offers = engine_offers(settings, facts)
    if args.json:
        print(msgspec.json.encode(offers).decode())
    else:
        note = "" if facts.has_weights else ", which has no weights yet"
        print(f"engines for {facts.name}{note}, in the order of choice:\n")
        print("\n".join(format_offers(offers)))
    usable = [offer.kind for offer in offers if not offer.problem and offer.kind not in ON_REQUEST]
    return 0 if usable else 1


def format_offers(offers: Sequence[EngineOffer]) -> list[str]:
    """Return the lines of a table, each with the engine's command below it."""
    from dynamo.inference.engines.choice import ON_REQUEST

    rows = [
        (
            offer.kind,
            "if named" if offer.kind in ON_REQUEST else "no" if offer.problem else "yes",
            f"{offer.memory_bytes / 1e9:.1f} GB" if offer.memory_bytes else "",
            offer.problem,
        )
        for offer in offers
    ]
    table = format_table([("engine", "serves", "weights", "why not"), *rows])
    lines = table[:1]
    for offer, line in zip(offers, table[1:], strict=True):
        lines.append(line)
        if offer.command:
            lines.append(f"  -> {offer.command}")
    return lines
