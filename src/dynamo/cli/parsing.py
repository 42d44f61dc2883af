"""A parser whose complaints are ours: an error that names the nearest flag, and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dynamo.core.errors import ConfigError


def check_writable(*paths: str | None) -> None:
    """Before the work, not after it; None and "-" (standard output) are no files. Raises
    `ConfigError`."""
    for path in paths:
        if path is None or path == "-":
            continue
        target = Path(path)
        place = target if target.exists() else target.parent
        if target.is_dir() or not os.access(place, os.W_OK):
            raise ConfigError(f"cannot write {path}", hint="a file in a folder that is there")


DESCRIPTION_WIDTH = 100
"""Of a description; the flags below it keep to the terminal's."""


class Parser(argparse.ArgumentParser):
    """Flags and words in any order."""

    def __init__(self, prog: str, description: str, examples: str = "", usage: str = "") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}" if usage else None,
            description="\n".join(map(_wrap, description.splitlines())),
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Raises `ConfigError` for what is not understood; exits after `--help`."""
        found, left = self.parse_known_intermixed_args(list(arguments))
        if left:
            raise ConfigError(f"unknown argument {left[0]!r}", hint=self._suggest_flag(left[0]))
        return found

    def error(self, message: str) -> NoReturn:
        """argparse's own complaint, as ours."""
        raise ConfigError(message, hint=f"see `{self.prog} --help`")

    def _suggest_flag(self, wrong: str) -> str:
        flag = wrong.partition("=")[0]
        if flag == "--url" and any(action.metavar == "URL" for action in self._actions):
            return f"the URL stands by itself: `{self.prog} URL`"
        flags = [one for action in self._actions for one in action.option_strings]
        near = difflib.get_close_matches(flag, flags, n=1)
        return f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"


def _wrap(line: str) -> str:
    return textwrap.fill(line, DESCRIPTION_WIDTH, break_on_hyphens=False)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Room for the flags of this program."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """`-f, --config FILE`, as Python writes it from 3.13 on."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"
