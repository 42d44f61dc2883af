"""`dynamo run`: fetch the model, start frontend and workers, serve until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dynamo.cli.inputs.batch_file import add_batch_flags, parse_batch_options
from dynamo.cli.parsing import Parser
from dynamo.cli.settings_flags import add_settings_flags, config_path, load_settings, read_settings
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import LoadedSettings, Settings, SourcedValue

if TYPE_CHECKING:
    from dynamo.runtime.processes.child import ChildSpec

TEXT = "text"
NONE = "none"
INPUTS = ("http", TEXT, NONE)
KNOWN_INPUTS = "in=http, in=text, in=batch:FILE.jsonl, in=none"
BATCH = "batch"
UNSUPPORTED_INPUTS = ("endpoint",)

REMOTE_MODELS_LABEL = "every model of workers elsewhere"

EXAMPLES = """\
  dynamo run                                     the default model on http://127.0.0.1:8000
  dynamo run ./model.gguf --http-port 8080       a GGUF file
  dynamo run out=mock ./model --workers 4 --router-mode least_loaded
  echo "What is the capital of France?" | dynamo run in=text
  dynamo run in=batch:questions.jsonl            answers in questions.out.jsonl"""


def parser() -> Parser:
    """Words in=, out= and MODEL, and a flag for every setting that has one."""
    made = Parser(
        "dynamo run",
        "Serve a model: frontend and workers, each a process, all under this one.\n\n"
        "Every setting can be given: --SECTION.KEY VALUE, $DYNAMO_SECTION__KEY, or in a file.\n"
        "The list is in docs/reference/settings.md; those with a flag of their own are below.",
        EXAMPLES,
        usage="[in=http|text|batch:FILE|none] [out=native|mock|echo] [MODEL] [FLAGS]",
    )
    made.add_argument(
        "words",
        nargs="*",
        metavar="in= out= MODEL",
        help="where requests come from (in=http; in=none: workers alone), what computes "
        "(out=native), and a model folder, GGUF file or hub name (SmolLM2-135M-Instruct)",
    )
    add_batch_flags(made)
    add_settings_flags(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped."""
    found = parser().parse(arguments)
    source, extra = parse_words(found.words)
    settings = checked_settings(load_settings(found, extra=extra))

    if source.startswith(BATCH):
        return serve_batch(settings, source.partition(":")[2], found)
    if source == TEXT:
        return serve_text(settings)
    return serve_http(settings, found, extra, workers_only=source == NONE)


def parse_words(words: Sequence[str]) -> tuple[str, Mapping[str, SourcedValue]]:
    """Where requests come from, and the settings that words stand for. Raises `ConfigError`."""
    source = "http"
    extra: dict[str, SourcedValue] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "in":
            source = _parse_input(value)
        elif equals and name == "out":
            extra["engine.kind"] = SourcedValue(value, word)
        elif not word:  # "$MODEL", which is not set
            raise ConfigError("the model is named by an empty word", hint="is a variable not set?")
        elif "model.path" in extra:
            first = extra["model.path"].raw
            raise ConfigError(
                f"two models: {first!r} and {word!r}", hint="one deployment serves one model"
            )
        else:
            extra["model.path"] = SourcedValue(word, f"argument {word}")
    return source, extra


def checked_settings(loaded: LoadedSettings) -> Settings:
    """The settings, which are possible. Raises `ConfigError` and `Unsupported`."""
    from dynamo.core.plugins import ENGINES
    from dynamo.telemetry.logs import parse_levels

    settings = loaded.settings
    ENGINES.check(settings.engine.kind)
    parse_levels(settings.logging.level)
    return settings


def serve_http(
    settings: Settings,
    found: argparse.Namespace,
    extra: Mapping[str, SourcedValue],
    *,
    workers_only: bool = False,
) -> int:
    """The whole deployment, on an HTTP port; `found` and `extra`: where its settings come from.
    `workers_only`: without the port, for frontends that run elsewhere."""
    from dynamo.cli.progress_bar import ProgressBar
    from dynamo.cli.served_model import served_model_names
    from dynamo.services.deployment.launch import (
        SettingsSource,
        deployment_specs,
        serve,
        serve_without_http,
        worker_specs,
    )
    from dynamo.services.model_download import make_preparation
    from dynamo.telemetry.logs import configure_logging

    as_json = settings.logging.format == "json"
    names = served_model_names(settings) if settings.engine.workers else [REMOTE_MODELS_LABEL]
    bar = ProgressBar(sys.stderr, as_logs=as_json)
    configure_logging(settings.logging.level, settings.logging.format, "supervisor", bar)
    tell = partial(log_announcement if as_json else announce, names)
    specs = worker_specs if workers_only else deployment_specs

    def again() -> tuple[Settings, Callable[[Settings], Sequence[ChildSpec]]]:
        return checked_settings(read_settings(found, extra=extra)), specs

    source = SettingsSource(again, config_path(found))
    prepare = make_preparation(settings, bar)
    if workers_only:
        return serve_without_http(settings, specs, tell, prepare=prepare, logs=bar, source=source)
    return serve(settings, tell, prepare=prepare, logs=bar, source=source)


def serve_text(settings: Settings) -> int:
    """A conversation on standard input and output."""
    from dynamo.cli.inputs.text import run_text

    return run_text(settings)


def serve_batch(settings: Settings, path: str, found: argparse.Namespace) -> int:
    """Answer a file's lines."""
    from dynamo.cli.inputs.batch import run_batch

    return run_batch(settings, parse_batch_options(path, found))


def announce(names: Sequence[str], url: str) -> None:
    """Tell that all serve, and how to try it; no `url`: to frontends that run elsewhere."""
    if not url:
        end = "end:  Ctrl-C, or `dynamo stop`\n"
        print(f"\n{', '.join(names)} is served to frontends\n\n{end}", file=sys.stderr, flush=True)
        return
    print(f"\n{', '.join(names)} is served at {url}/v1\n", file=sys.stderr)
    print(
        f"try:  {curl_example(url)}\nend:  Ctrl-C, or `dynamo stop`\n", file=sys.stderr, flush=True
    )


def log_announcement(names: Sequence[str], url: str) -> None:
    """The same as a log line, for programs."""
    import logging

    fields = {"models": list(names), "url": url}
    logging.getLogger(__name__).info("deployment serves", extra={"fields": fields})


def curl_example(url: str) -> str:
    """A request that works as it stands."""
    body = (
        '{"model": "default", "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


def _parse_input(value: str) -> str:
    kind = value.partition(":")[0]
    if kind in UNSUPPORTED_INPUTS:
        raise Unsupported(f"in={value} is not supported yet", hint=f"today: {KNOWN_INPUTS}")
    if value not in INPUTS and kind != BATCH:
        raise ConfigError(f"unknown input in={value}", hint=f"known: {KNOWN_INPUTS}")
    return value
