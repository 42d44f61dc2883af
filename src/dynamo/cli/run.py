"""`dynamo run`: fetch the model, start frontend and workers, and serve until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dynamo.cli.engine_check import check_engines
from dynamo.cli.inputs.batch_file import add_batch_flags, parse_batch_options
from dynamo.cli.parsing import Parser, served_model_names
from dynamo.cli.settings_flags import (
    add_settings_flags,
    config_path,
    load_settings,
    read_settings,
    settings_files,
)
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import LoadedSettings, Settings, SourcedValue
from dynamo.core.settings.load import MODELS_KEY
from dynamo.core.settings.server_url import lacks_tokenizer, server_url

if TYPE_CHECKING:
    from dynamo.runtime.processes.child_spec import ChildSpec
    from dynamo.runtime.processes.fork_server import Restore

TEXT = "text"
NONE = "none"
URL_SCHEMES = ("http://", "https://")
INPUTS = ("http", TEXT, NONE)
KNOWN_INPUTS = "in=http, in=text, in=batch:FILE.jsonl, in=none"
BATCH = "batch"

MAX_NAMES = 12
"""More models are counted in what `announce` prints."""
REMOTE_MODELS_LABEL = "every model of remote workers"

EXAMPLES = """\
  dynamo run                                     the default model on http://127.0.0.1:8000
  dynamo run ./model.gguf --http-port 8080       a GGUF file
  dynamo run out=mock ./model --workers 4 --router-mode least_loaded
  echo "What is the capital of France?" | dynamo run in=text
  dynamo run in=batch:questions.jsonl            answers in questions.out.jsonl"""


def parser() -> Parser:
    """Return the parser: the words in=, out= and MODEL, and the settings' flags."""
    parser = Parser(
        "dynamo run",
        "Serve a model: starts a frontend and workers as child processes.\n\n"
        "Every setting can be given as --SECTION.KEY VALUE, as $DYNAMO_SECTION__KEY or in a file.\n"
        "`dynamo config explain` lists all settings; those with a short flag are below.",
        EXAMPLES,
        usage="[in=http|text|batch:FILE|none] [out=auto|native|llamacpp|vllm|mock|echo|script|"
        "openai URL..] [MODEL] [FLAGS]",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="in= out= MODEL",
        help="source of requests (default: in=http; in=none runs workers only), engine (default: "
        "out=auto, the first that serves the model here: see `dynamo engines`), and a model "
        "folder, GGUF file or hub name, or several (default: SmolLM2-135M-Instruct)",
    )
    add_batch_flags(parser)
    add_settings_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped."""
    args = parser().parse(arguments)
    source, extra = parse_words(args.words)
    loaded = load_settings(args, extra=extra)
    settings = checked_settings(loaded, print_note)

    if source.startswith(BATCH):
        from dynamo.cli.inputs.batch import run_batch

        return run_batch(settings, parse_batch_options(source.partition(":")[2], args))
    if source == TEXT:
        from dynamo.cli.inputs.text import run_text

        return run_text(settings)
    return serve_http(settings, args, extra, workers_only=source == NONE, defaults=loaded.settings)


def parse_words(words: Sequence[str]) -> tuple[str, Mapping[str, SourcedValue]]:
    """Return the input (http, text, none or batch:FILE) and the settings that the words give.
    Raises `ConfigError`."""
    source = "http"
    extra: dict[str, SourcedValue] = {}
    models: list[SourcedValue] = []
    urls = [server_url(word) for word in words if word.startswith(URL_SCHEMES)]
    if urls:
        extra["engine.urls"] = SourcedValue(urls, "arguments")
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "in":
            source = _parse_input(value)
        elif equals and name == "out":
            extra["engine.kind"] = SourcedValue(value, word)
        elif word.startswith(URL_SCHEMES):
            continue
        elif not word:  # e.g. "$MODEL" without a value
            raise ConfigError("empty word for the model", hint="is a shell variable not set?")
        else:
            models.append(SourcedValue(word, f"argument {word}"))
    if len(models) > 1:
        extra[MODELS_KEY] = SourcedValue([{"path": model} for model in models], "arguments")
    elif models:
        extra["model.path"] = models[0]
    return source, extra


def checked_settings(
    loaded: LoadedSettings, on_note: Callable[[str], None] | None = None
) -> Settings:
    """Choose the engine; check engines, log level and planes. `on_note` gets notes on settings
    without effect. Raises `ConfigError`, `Unsupported`, and the errors of `chosen_engine`."""
    from dynamo.models.answers.families import find_family
    from dynamo.runtime.planes import planes_of
    from dynamo.services.deployment.model_groups import with_engines, worker_groups
    from dynamo.telemetry.log_output import check_log_output
    from dynamo.telemetry.logs import parse_levels

    settings = with_engines(loaded.settings)
    groups = [group.settings for group in worker_groups(settings)] or [settings]
    for note in check_engines(groups, loaded.origins):
        if on_note is not None:
            on_note(note)
    for model in settings.each_model:
        if model.model.tool_format:
            find_family(model.model.tool_format)
    parse_levels(settings.logging.level)
    check_log_output(settings.logging.output)
    planes_of(settings)
    return settings


def serve_http(
    settings: Settings,
    args: argparse.Namespace,
    extra: Mapping[str, SourcedValue],
    *,
    workers_only: bool = False,
    defaults: Settings | None = None,
    restore: Restore | None = None,
) -> int:
    """Serve a deployment until it is stopped. A reload reads the settings from `args` and `extra`
    again. `defaults` are those of models that are added. With `workers_only`, there is no HTTP
    port, and remote frontends use the workers. `restore`: see `serve`."""
    from dynamo.cli.progress_bar import ProgressBar
    from dynamo.services.deployment.launch import (
        SettingsSource,
        deployment_specs,
        serve,
        worker_specs,
    )
    from dynamo.services.model_store.preparation import make_preparation
    from dynamo.telemetry.log_output import open_log_output
    from dynamo.telemetry.logs import configure_logging

    as_json = settings.logging.format == "json"
    names = served_model_names(settings) if settings.worker_count else [REMOTE_MODELS_LABEL]
    bar = ProgressBar(open_log_output(settings.logging.output), as_logs=as_json)
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", bar)
    announce_ready = (
        partial(log_announcement, names) if as_json else partial(announce, names, settings)
    )
    specs = worker_specs if workers_only else deployment_specs

    def reload() -> tuple[Settings, Callable[[Settings], Sequence[ChildSpec]]]:
        return checked_settings(read_settings(args, extra=extra)), specs

    source = SettingsSource(reload, settings_files(args), defaults or settings, config_path(args))
    prepare = make_preparation(settings.each_model, bar)
    return serve(
        settings,
        announce_ready,
        prepare=prepare,
        logs=bar,
        specs=specs,
        source=source,
        http=not workers_only,
        restore=restore,
    )


def print_note(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {text}", file=sys.stderr)


def announce(names: Sequence[str], settings: Settings, url: str) -> None:
    """Print how to use the models. `url` is empty for workers without an HTTP port."""
    from dynamo.core.installation import dynamo_command
    from dynamo.models.location import computes_embeddings

    first = settings.each_model[0]
    embeds = not lacks_tokenizer(first) and computes_embeddings(first.model.path)
    where, example = f"to frontends of namespace {settings.runtime.namespace}", ""
    if url:
        command = (curl_embeddings_example if embeds else curl_example)(url)
        if settings.server.api_keys:
            command += " -H 'authorization: Bearer KEY'"
        example = f"try:  {command}\nlook: {url} in a browser\n{better_model_note(settings)}"
        where = f"at {url}/v1"
    verb = "are" if settings.models else "is"
    end = f"end:  Ctrl-C, or `{dynamo_command()} stop`\n"
    rest = len(names) - MAX_NAMES
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
    text = f"\n{shown} {verb} served {where}\n\n{example}{end}"
    print(text, file=sys.stderr, flush=True)


def better_model_note(settings: Settings) -> str:
    """Return a line on what to expect of the default model, with a better one that fits into the
    memory. "" for another model."""
    from dynamo.core.installation import dynamo_command
    from dynamo.inference.native.engine_sizing import available_memory_bytes
    from dynamo.models.downloads.hub import BETTER_MODELS
    from dynamo.models.downloads.wheel_models import DEFAULT_MODEL

    computes = settings.engine.kind not in {"mock", "echo", "script", "openai"}
    if settings.models or settings.model.path not in {"", DEFAULT_MODEL.name} or not computes:
        return ""
    text = "note: this model has 135M weights: it shows that serving works, and is often wrong"
    free = available_memory_bytes(settings.worker_count)
    name = next((name for name, needed in BETTER_MODELS if free >= needed), "")
    if not name:
        return f"{text}\n"
    return f"{text}; a better one, from the hub: {dynamo_command()} run {name}\n"


def log_announcement(names: Sequence[str], url: str) -> None:
    """Log that the models are served."""
    import logging

    fields = {"models": list(names), "url": url}
    logging.getLogger(__name__).info("deployment serves", extra={"fields": fields})


def curl_example(url: str) -> str:
    """Return a shell command that sends a request to the server."""
    body = (
        '{"model": "default", "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


def curl_embeddings_example(url: str) -> str:
    """Return a shell command that asks the server for the vectors of two texts."""
    body = '{"model": "default", "input": ["The weather is lovely today.", "It is sunny."]}'
    return f"curl {url}/v1/embeddings -H 'content-type: application/json' -d '{body}'"


def _parse_input(value: str) -> str:
    kind = value.partition(":")[0]
    if kind == "endpoint":
        raise Unsupported(f"in={value} is not supported yet", hint=f"supported: {KNOWN_INPUTS}")
    if value not in INPUTS and kind != BATCH:
        raise ConfigError(f"unknown input in={value}", hint=f"known: {KNOWN_INPUTS}")
    return value
