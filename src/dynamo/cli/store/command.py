"""`dynamo store list|pull|remove|verify`, and the short forms `dynamo list`, `pull` and `rm`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, load_settings


class StoreCommand(msgspec.Struct, frozen=True):
    """A command about stored models, `dynamo NAME [MODEL]`. `model` is "MODEL", "[MODEL]" or "".
    The function of `actions` that is called `action` does the work."""

    name: str
    action: str
    description: str
    examples: str
    model: str = "MODEL"

    def parser(self) -> Parser:
        """Return the parser: the model, and flags of settings."""
        usage = f"{self.model} [FLAGS]".strip()
        parser = Parser(f"dynamo {self.name}", self.description, self.examples, usage=usage)
        if self.model:
            count = None if self.model == "MODEL" else "?"
            text = "name on the hub, or s3://BUCKET/FOLDER"
            parser.add_argument("model", metavar="MODEL", nargs=count, default="", help=text)
        add_settings_flags(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command and return its exit code."""
        from dynamo.cli.store import actions

        args = self.parser().parse(arguments)
        settings, model = load_settings(args).settings, getattr(args, "model", "")
        code: int = getattr(actions, self.action)(settings, model)
        return code


PULL = StoreCommand(
    "pull",
    "pull",
    "Fetch a model from the hub or a bucket, with its size before the first byte. A download that "
    "was interrupted is resumed. A name that is here is brought up to date. `dynamo run` takes the "
    "same name.",
    """\
  dynamo pull Qwen/Qwen3-0.6B
  dynamo pull Qwen/Qwen3-0.6B@main                            a branch, a tag or a commit
  dynamo pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M     a GGUF file of a repository
  dynamo pull s3://models/qwen3-0.6b                          a folder of a bucket (AWS_*)""",
)
LIST = StoreCommand(
    "list",
    "list_models",
    "List the models on this machine by the names that `dynamo run` takes. With a shared discovery "
    "plane, also what each process of the cluster has.",
    "  dynamo list",
    model="",
)
REMOVE = StoreCommand(
    "rm", "remove", "Delete a fetched model from this machine.", "  dynamo rm Qwen/Qwen3-0.6B"
)
VERIFY = StoreCommand(
    "store verify",
    "verify",
    "Check the files of a model, or of all, by their hashes. A model with damage is deleted.",
    "  dynamo store verify\n  dynamo store verify Qwen/Qwen3-0.6B",
    model="[MODEL]",
)
SERVE = StoreCommand(
    "store serve",
    "serve",
    "Keep models for the workers of a cluster: what a worker wants is fetched here, once, and sent "
    "to all. Stop it by Ctrl-C.",
    "  dynamo store serve -f cluster.yaml --store.budget 500GB",
    model="",
)
ACTIONS = {"list": LIST, "pull": PULL, "remove": REMOVE, "verify": VERIFY, "serve": SERVE}


class StoreCommands:
    """`dynamo store ACTION`."""

    def parser(self) -> Parser:
        """Return the parser: the action and the model."""
        parser = Parser(
            "dynamo store",
            "The fetched models on this machine: list them, fetch one, delete one, check their "
            "hashes.",
            "\n".join(dict.fromkeys(f"  dynamo store {name} ..." for name in ACTIONS)),
            usage="{list,pull,remove,verify,serve} [MODEL] [FLAGS]",
        )
        parser.add_argument("action", choices=tuple(ACTIONS), metavar="ACTION")
        parser.add_argument("model", nargs="?", metavar="MODEL", help="see `dynamo pull --help`")
        add_settings_flags(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command of the first word."""
        if arguments and arguments[0] in ACTIONS:
            return ACTIONS[arguments[0]].run(arguments[1:])
        self.parser().parse(arguments)
        raise AssertionError("the parser refuses other actions")


STORE = StoreCommands()
