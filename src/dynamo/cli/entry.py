"""The `dynamo` program: runs a command and prints its errors without a traceback."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

from dynamo import __version__
from dynamo.cli.commands import COMMANDS, command_run
from dynamo.cli.parsing import EXIT_INTERRUPTED
from dynamo.core.errors import ConfigError, DynamoError, describe_os_error, nearest_name_hint
from dynamo.core.redaction import redact, remember_environment

USAGE_ERROR_CODES = (ConfigError.code, "unsupported")


def main(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code: 0, 1 failure, 2 usage error, 130 interrupted."""
    remember_environment(os.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals without UTF-8
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # an error at the interpreter's own flush has no place
        return code
    except DynamoError as error:
        print(f"error: {redact(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {redact(error.hint)}", file=sys.stderr)
        return 2 if error.code in USAGE_ERROR_CODES else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of standard output has ended (`dynamo ps | head`)
        _discard_stdout()
        return 0
    except OSError as error:  # e.g. a full disk, missing permissions
        if error.errno == errno.ENOSPC:
            _discard_stdout()
        print(f"error: {redact(describe_os_error(error))}", file=sys.stderr)
        return 1


def _discard_stdout() -> None:
    """Redirect standard output to /dev/null, so that the interpreter's final flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in {"-h", "--help", "help"}:
        topic = arguments[1] if first == "help" and arguments[1:] else "--help"
        if not topic.startswith("-"):  # dynamo help run
            return _dispatch([topic, "--help"])
        print(overview())
        return 0
    if first in {"-V", "--version", "version"}:
        print(f"dynamo {__version__}")
        return 0
    if first not in COMMANDS:
        hint = _hint_for_command(first)
        raise ConfigError(f"unknown command {first!r}", hint=hint)
    return command_run(first)(arguments[1:])


FOREIGN_COMMANDS = {
    "ps": ("status", "list", "ls", "show", "top", "info"),
    "run": ("start", "up", "launch", "load", "pull"),
    "stop": ("down", "kill", "quit", "halt", "rm", "unload"),
    "bench": ("benchmark", "perf"),
}
"""Names that other programs have for our commands. Some resemble `restart`, which does harm."""


def _hint_for_command(wrong: str) -> str:
    for name, others in FOREIGN_COMMANDS.items():
        if wrong in others:
            return f"`dynamo {name}`: {COMMANDS[name].help}"
    return nearest_name_hint(wrong, _visible_commands())


def overview() -> str:
    """Return the text of `dynamo --help`."""
    lines = [f"  {name:<11}{COMMANDS[name].help}" for name in _visible_commands()]
    return OVERVIEW.format("\n".join(lines))


OVERVIEW = """\
usage: dynamo COMMAND [ARGUMENTS]

Serve large language models, on one machine or many.

commands:
{}

  dynamo COMMAND --help     arguments of a command
  dynamo --version

examples:
  dynamo run                                   the default model on http://127.0.0.1:8000
  dynamo run ./model.gguf --http-port 8080     a model from a file
  dynamo run out=mock ./model --workers 4      simulated workers
  dynamo ps                                    running processes
  dynamo stop                                  stop the deployment"""


def _visible_commands() -> list[str]:
    return [name for name, command in COMMANDS.items() if not command.hidden]
