"""`dynamo add`, `remove` and `models`: the models that a running deployment serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.control import DEPLOYMENT_HELP, add_timeout_flag, print_progress, send
from dynamo.cli.parsing import Parser, format_table
from dynamo.cli.settings_flags import add_settings_flags
from dynamo.core.errors import ConfigError
from dynamo.core.settings import SourcedValue
from dynamo.core.settings.server_url import server_url

if TYPE_CHECKING:
    from dynamo.runtime.processes.control import ControlRequest
    from dynamo.runtime.processes.served_models import ModelStatus

URL_SCHEMES = ("http://", "https://")
MODEL_SECTIONS = ("model", "engine", "cache", "workers")
GROUP_COUNTS = {
    "workers.prefill.replicas": "prefill_workers",
    "workers.decode.replicas": "decode_workers",
}
DEPLOYMENT_KEY = "runtime.deployment"
ENGINE_KEY = "engine.kind"


class AddCommand:
    """`dynamo add`: another model, or a server's URL as one more worker of the model."""

    def parser(self) -> Parser:
        """Return the parser: the words, and the settings of a model."""
        parser = Parser(
            "dynamo add",
            "Add a model to a running deployment: its workers start, and the command returns when "
            "they serve. The flags are those of `dynamo run` that are about a model. A server's "
            "URL without out= becomes one more worker of the deployment's model. With "
            "--adapter-of, a LoRA adapter of a served model is added.",
            """\
  dynamo add ./qwen --model-name qwen --workers 2
  dynamo add ./small.gguf out=llamacpp --save         into the list models of the settings file
  dynamo add ./sql --adapter-of qwen --model-name sql
  dynamo add out=openai http://10.0.0.5:8000 --model-name remote      a model of its own
  dynamo add http://10.0.0.5:8000                     a worker of the model that is served
  dynamo add http://10.0.0.5:8000 --model-name smollm2""",
            usage="[out=ENGINE] MODEL|URL [--model-name NAME] [--workers N] [FLAGS]",
        )
        parser.add_argument(
            "words",
            nargs="+",
            metavar="out= MODEL|URL",
            help="a model folder, GGUF file or hub name, or a server's URL; --model-name of a URL "
            "without out= is its model there, if it has several",
        )
        parser.add_argument("--save", action="store_true", help="write the model into the file")
        parser.add_argument(
            "--adapter-of",
            metavar="MODEL",
            help="the folder is a LoRA adapter of this model; --model-name is its name in "
            "requests, by default the folder's",
        )
        parser.add_argument(
            "--kv-events",
            default="",
            metavar="tcp://HOST:PORT[/REPLAY_PORT]",
            help="where a server publishes its KV events; without them its cache is predicted",
        )
        add_timeout_flag(parser)
        add_settings_flags(parser, shown=MODEL_SECTIONS)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Send the request and print the deployment's messages until it is done."""
        from dynamo.runtime.processes.control import ControlRequest

        args = self.parser().parse(arguments)
        flags = {key: value for key, value in vars(args).items() if isinstance(value, SourcedValue)}
        named = flags.pop(DEPLOYMENT_KEY, None)
        entry = model_entry_of(args.words, flags)
        urls = entry.get("engine.urls", ())
        if args.adapter_of is not None:
            request = _adapter_request(entry, args.adapter_of, save=args.save)
        elif urls and ENGINE_KEY not in entry and "path" not in entry:
            names = entry.get("names") or [""]
            request = ControlRequest("add", urls[0], model=names[0], kv_events=args.kv_events)
        else:
            if args.kv_events:
                entry["engine.url_kv_events"] = [args.kv_events]
            request = ControlRequest("add_model", "", entry=entry, save=args.save)
        return print_progress(request, str(named.raw) if named else None, args.timeout)


def model_entry_of(words: Sequence[str], flags: Mapping[str, SourcedValue]) -> dict[str, Any]:
    """Return the entry of `models` that the words and flags of `dynamo add` give, by key. Raises
    `ConfigError`."""
    entry: dict[str, Any] = {}
    for word in words:
        if word.startswith("out="):
            entry[ENGINE_KEY] = word.removeprefix("out=")
        elif word.startswith(URL_SCHEMES):
            entry.setdefault("engine.urls", []).append(server_url(word))
        elif "path" in entry:
            raise ConfigError(f"two models: {entry['path']!r} and {word!r}", hint="add one a time")
        else:
            # The deployment runs in another folder.
            path = Path(word).expanduser()
            entry["path"] = str(path.absolute()) if word and path.exists() else word
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if section not in MODEL_SECTIONS or key == "workers.flexible":
            raise ConfigError(
                f"{value.origin} is about the whole deployment and not about one model",
                hint="see `dynamo add --help`",
                param=key,
            )
        if key in GROUP_COUNTS:
            entry[GROUP_COUNTS[key]] = [{"replicas": value.raw}]
        else:
            entry[name if section == "model" else key] = value.raw
    return entry


def _adapter_request(entry: Mapping[str, Any], model: str, *, save: bool) -> ControlRequest:
    """Return the request for a LoRA adapter. Raises `ConfigError`."""
    from dynamo.runtime.processes.control import ControlRequest

    path = entry.get("path", "")
    names = entry.get("names") or [Path(path).name]
    if other := next((key for key in entry if key not in {"path", "names"}), ""):
        raise ConfigError(
            f"an adapter has no {other} of its own",
            hint=f"write `dynamo add FOLDER --adapter-of {model} --model-name NAME`",
        )
    if not Path(path).is_dir():
        raise ConfigError(
            f"{path or 'the adapter'} is no folder on this host",
            hint="name the folder that has adapter_config.json",
        )
    if len(names) > 1:
        raise ConfigError(f"an adapter has one name and not {', '.join(names)}")
    return ControlRequest("add_adapter", names[0], model=model, path=path, save=save)


class RemoveCommand:
    """`dynamo remove`: a model, an adapter, an alias, or a server that was added by its URL."""

    def parser(self) -> Parser:
        """Return the parser: what to remove."""
        parser = Parser(
            "dynamo remove",
            "Stop serving a model or a LoRA adapter. New requests get 404, those in flight end, "
            "then the model's workers stop. An alias is deleted and its model served on. Of a "
            "server's URL, the requests move to other workers.",
            """\
  dynamo remove qwen
  dynamo remove qwen --save                  from the settings file, too
  dynamo remove http://10.0.0.5:8000""",
        )
        parser.add_argument("target", metavar="NAME|URL", help="see `dynamo models`")
        parser.add_argument("--save", action="store_true", help="delete it from the settings file")
        _add_deployment_flags(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Send the request and print the deployment's messages until it is done."""
        from dynamo.runtime.processes.control import ControlRequest

        args = self.parser().parse(arguments)
        if args.target.startswith(URL_SCHEMES):
            request = ControlRequest("remove", server_url(args.target))
        else:
            request = ControlRequest("remove_model", args.target, save=args.save)
        return print_progress(request, args.deployment, args.timeout)


class ModelsCommand:
    """`dynamo models`: the models of a deployment; moves aliases."""

    def parser(self) -> Parser:
        """Return the parser: --json and --alias."""
        parser = Parser(
            "dynamo models",
            "List the models that a running deployment serves, or let a name mean another one: the "
            "next request under that name goes there.",
            """\
  dynamo models
  dynamo models --json
  dynamo models --alias chat=qwen3
  dynamo models --alias chat=qwen3 --save    in the settings file, too""",
        )
        parser.add_argument("--json", action="store_true", help="print a JSON array")
        parser.add_argument("--alias", metavar="ALIAS=MODEL", help="let ALIAS mean MODEL")
        parser.add_argument("--save", action="store_true", help="write the alias into the file")
        _add_deployment_flags(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> int:
        """Print the models, or send the request."""
        from dynamo.runtime.processes.control import ControlRequest
        from dynamo.runtime.processes.served_models import ModelStatus

        args = self.parser().parse(arguments)
        if args.alias is not None:
            alias, equals, model = args.alias.partition("=")
            if not (equals and alias and model):
                raise ConfigError(f"{args.alias!r} is not ALIAS=MODEL", hint="e.g. chat=qwen3")
            request = ControlRequest("alias", alias, model=model, save=args.save)
            return print_progress(request, args.deployment, args.timeout)
        if args.save:
            raise ConfigError("--save without --alias", hint="write --alias ALIAS=MODEL --save")
        (answer,) = send(ControlRequest("models", ""), args.deployment, args.timeout)
        if args.json:
            print(answer)
        else:
            print("\n".join(_table(msgspec.json.decode(answer, type=list[ModelStatus]))))
        return 0


def _table(models: Sequence[ModelStatus]) -> list[str]:
    rows = [("MODEL", "ALIASES", "STATE", "WORKERS", "ENGINE", "PATH")]
    for model in models:
        engine = model.engine
        workers = f"{model.workers}/{model.desired}"
        path = model.path or "(the default model)"
        rows.append(
            (model.name, ", ".join(model.aliases) or "-", model.state, workers, engine, path)
        )
        rows += [
            (name, f"(adapter of {model.name})", model.state, workers, engine, folder)
            for name, folder in model.adapters.items()
        ]
    reasons = [f"{model.name}: {model.reason}" for model in models if model.reason]
    return [*format_table(rows), *([""] if reasons else []), *reasons]


def _add_deployment_flags(parser: Parser) -> None:
    parser.add_argument("--deployment", metavar="NAME|PORT", help=DEPLOYMENT_HELP)
    add_timeout_flag(parser)


ADD, REMOVE, MODELS = AddCommand(), RemoveCommand(), ModelsCommand()
