"""The command that installs missing libraries, for hints that work where they are printed."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
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
    pip = [sys.executable, "-m", "pip", "install"]
    if find_spec("pip") is not None:
        return shlex.join([*pip, *package])
    if uv := shutil.which("uv"):
        return shlex.join([uv, "pip", "install", "--python", sys.executable, *package])
    return f"{shlex.join([sys.executable, '-m', 'ensurepip'])} && {shlex.join([*pip, *package])}"
