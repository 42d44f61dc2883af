"""`dynamo run`: fetch the model, start frontend and workers, serve until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dynamo.cli.batch_options import add_flags as add_batch_flags
from dynamo.cli.batch_options import options as batch_options
from dynamo.cli.flags import add_settings, file_of, load_settings, read_settings
from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError, Unsupported
from dynamo.core.settings import Given, Loaded, Settings

if TYPE_CHECKING:
    from dynamo.runtime.child import ProcessSpec

TEXT = "text"
NONE = "none"
INPUTS = ("http", TEXT, NONE)
KNOWN = "in=http, in=text, in=batch:FILE.jsonl, in=none"
BATCH = "batch"
INPUTS_NOT_YET = ("endpoint",)

ELSEWHERE = "every model of workers elsewhere"

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
    add_settings(made)
    return made


def run(arguments: Sequence[str]) -> int:
    """Serve until stopped."""
    found = parser().parse(arguments)
    source, extra = read_words(found.words)
    settings = checked(load_settings(found, extra=extra))

    if source.startswith(BATCH):
        return serve_batch(settings, source.partition(":")[2], found)
    if source == TEXT:
        return serve_text(settings)
    return serve_http(settings, found, extra, workers_only=source == NONE)


def read_words(words: Sequence[str]) -> tuple[str, Mapping[str, Given]]:
    """Where requests come from, and the settings that words stand for. Raises `ConfigError`."""
    source = "http"
    extra: dict[str, Given] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "in":
            source = _input(value)
        elif equals and name == "out":
            extra["engine.kind"] = Given(value, word)
        elif not word:  # "$MODEL", which is not set
            raise ConfigError("the model is named by an empty word", hint="is a variable not set?")
        elif "model.path" in extra:
            first = extra["model.path"].raw
            raise ConfigError(
                f"two models: {first!r} and {word!r}", hint="one deployment serves one model"
            )
        else:
            extra["model.path"] = Given(word, f"argument {word}")
    return source, extra


def checked(loaded: Loaded) -> Settings:
    """The settings, which are possible. Raises `ConfigError` and `Unsupported`."""
    from dynamo.inference.engines import check_kind
    from dynamo.telemetry.logs import parse_levels

    settings = loaded.settings
    check_kind(settings.engine.kind)
    parse_levels(settings.logging.level)
    return settings


def serve_http(
    settings: Settings,
    found: argparse.Namespace,
    extra: Mapping[str, Given],
    *,
    workers_only: bool = False,
) -> int:
    """The whole deployment, on an HTTP port; `found` and `extra`: where its settings come from.
    `workers_only`: without the port, for frontends that run elsewhere."""
    from dynamo.cli.bar import Bar
    from dynamo.cli.fetch import names_of
    from dynamo.services.launch import (
        Source,
        deployment_specs,
        serve,
        serve_unheard,
        worker_specs,
    )
    from dynamo.services.preparation import preparation
    from dynamo.telemetry.logs import configure

    as_json = settings.logging.format == "json"
    names = names_of(settings) if settings.engine.workers else [ELSEWHERE]
    bar = Bar(sys.stderr, as_logs=as_json)
    configure(settings.logging.level, settings.logging.format, "supervisor", bar)
    tell = partial(log_announcement if as_json else announce, names)
    specs = worker_specs if workers_only else deployment_specs

    def again() -> tuple[Settings, Callable[[Settings], Sequence[ProcessSpec]]]:
        return checked(read_settings(found, extra=extra)), specs

    source = Source(again, file_of(found))
    prepare = preparation(settings, bar)
    if workers_only:
        return serve_unheard(settings, specs, tell, prepare=prepare, logs=bar, source=source)
    return serve(settings, tell, prepare=prepare, logs=bar, source=source)


def serve_text(settings: Settings) -> int:
    """A conversation on standard input and output."""
    from dynamo.cli.converse import start

    return start(settings)


def serve_batch(settings: Settings, path: str, found: argparse.Namespace) -> int:
    """Answer a file's lines."""
    from dynamo.cli.batch import start

    return start(settings, batch_options(path, found))


def announce(names: Sequence[str], url: str) -> None:
    """Tell that all serve, and how to try it; no `url`: to frontends that run elsewhere."""
    if not url:
        end = "end:  Ctrl-C, or `dynamo stop`\n"
        print(f"\n{', '.join(names)} is served to frontends\n\n{end}", file=sys.stderr, flush=True)
        return
    print(f"\n{', '.join(names)} is served at {url}/v1\n", file=sys.stderr)
    print(f"try:  {curl(url)}\nend:  Ctrl-C, or `dynamo stop`\n", file=sys.stderr, flush=True)


def log_announcement(names: Sequence[str], url: str) -> None:
    """The same as a log line, for programs."""
    import logging

    fields = {"models": list(names), "url": url}
    logging.getLogger(__name__).info("deployment serves", extra={"fields": fields})


def curl(url: str) -> str:
    """A request that works as it stands."""
    body = (
        '{"model": "default", "temperature": 0, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


def _input(value: str) -> str:
    kind = value.partition(":")[0]
    if kind in INPUTS_NOT_YET:
        raise Unsupported(f"in={value} is not supported yet", hint=f"today: {KNOWN}")
    if value not in INPUTS and kind != BATCH:
        raise ConfigError(f"unknown input in={value}", hint=f"known: {KNOWN}")
    return value
