"""`dynamo`: find the command, run it, tell what went wrong without a traceback."""

from __future__ import annotations

import difflib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

from dynamo import __version__
from dynamo.cli.commands import COMMANDS, command_run
from dynamo.core.errors import ConfigError, DynamoError, describe_os_error

EXIT_INTERRUPTED = 128 + signal.SIGINT
USAGE_ERROR_CODES = (ConfigError.code, "unsupported")


def main(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code: 0, 1 failure, 2 usage, 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has not every character
    try:
        return _dispatch(arguments)
    except DynamoError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 2 if error.code in USAGE_ERROR_CODES else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left (`dynamo ps | head`)
        _discard_stdout()
        return 0
    except OSError as error:  # what the machine does not let us: a full disk, a closed folder
        if error.errno == errno.ENOSPC:
            _discard_stdout()
        print(f"error: {describe_os_error(error)}", file=sys.stderr)
        return 1


def _discard_stdout() -> None:
    """Nothing can be written to standard output: the interpreter must not flush it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in {"-h", "--help", "help"}:
        of = arguments[1] if first == "help" and arguments[1:] else "--help"
        if not of.startswith("-"):  # dynamo help run
            return _dispatch([of, "--help"])
        print(overview())
        return 0
    if first in {"-V", "--version", "version"}:
        print(f"dynamo {__version__}")
        return 0
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, _visible_commands(), n=1)
        hint = (
            f"did you mean `dynamo {near[0]}`?"
            if near
            else f"commands: {', '.join(_visible_commands())}"
        )
        raise ConfigError(f"unknown command {first!r}", hint=hint)
    return command_run(first)(arguments[1:])


def overview() -> str:
    """What `dynamo --help` prints."""
    lines = [f"  {name:<10}{COMMANDS[name].help}" for name in _visible_commands()]
    return OVERVIEW.format("\n".join(lines))


OVERVIEW = """\
usage: dynamo COMMAND [ARGUMENTS]

Serve large language models, on one machine or many.

commands:
{}

  dynamo COMMAND --help     what a command takes
  dynamo --version

examples:
  dynamo run                                   the default model on http://127.0.0.1:8000
  dynamo run ./model.gguf --http-port 8080     a model of yours
  dynamo run out=mock ./model --workers 4      simulated workers
  dynamo ps                                    what runs
  dynamo stop                                  end it"""


def _visible_commands() -> list[str]:
    return [name for name, command in COMMANDS.items() if not command.hidden]
