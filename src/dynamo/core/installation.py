"""The command that installs missing libraries, for hints that work where they are printed."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

DISTRIBUTION = "dynamo-python"
SOURCE_FOLDER = "src"


ALONE = {"nixl": "nixl-cu12"}
"""Extras of one package each that declares libraries which nothing here needs."""


def install_command(extra: str = "") -> str:
    """Return a shell command that installs this package with `extra` where this interpreter finds
    it. A checkout is installed as such; an index may not have the package."""
    source = Path(__file__).resolve().parents[2]
    checkout = source.parent
    options = f"[{extra}]" if extra else ""
    if source.name == SOURCE_FOLDER and (checkout / "pyproject.toml").is_file():
        package = ["--editable", f"{checkout}{options}"]
    else:
        package = [f"{DISTRIBUTION}{options}"]
    if extra in ALONE:
        package = ["--no-deps", ALONE[extra]]
    return pip_command("install", *package)


def dynamo_command() -> str:
    """Return the name of this program for a shell: `dynamo` where the shell finds one, or else its
    path, as after `make run`."""
    installed = Path(sys.executable).with_name("dynamo")
    if shutil.which("dynamo") or not installed.exists():
        return "dynamo"
    return shlex.quote(str(installed))


def has_pip() -> bool:
    """Whether this interpreter finds pip. Finders of `sys.meta_path` are not asked: that of
    setuptools, asked for pip, hides from this process the distutils that vLLM needs."""
    return PathFinder.find_spec("pip") is not None


def pip_command(command: str, *arguments: str) -> str:
    """Return a shell command of pip, or of uv in an environment without pip, for this
    interpreter."""
    pip = [sys.executable, "-m", "pip"]
    if has_pip():
        return shlex.join([*pip, command, *arguments])
    if uv := shutil.which("uv"):
        arguments = tuple(word for word in arguments if word != "--yes")  # uv does not ask
        return shlex.join([uv, "pip", command, "--python", sys.executable, *arguments])
    ensure_pip = shlex.join([sys.executable, "-m", "ensurepip"])
    return f"{ensure_pip} && {shlex.join([*pip, command, *arguments])}"
