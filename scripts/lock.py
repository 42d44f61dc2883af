#!/usr/bin/env python3
"""Pin every package with its hashes: write requirements/*.txt from pyproject.toml.

    scripts/lock.py [--upgrade]

Needs the program `uv`. Pins that still fit stay as they are, unless --upgrade is given. The pins
hold for every Python and platform: all files of a version have hashes, and markers choose versions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
LOCKS = {
    "test": ("etcd", "nats", "test", "check"),
    "image": ("etcd", "nats", "s3", "zstd"),
    "run": (),
}
"""Name of a file -> the extras in it. The others have the versions of the first one."""
UNUSED = {"run": ("huggingface-hub",)}
"""Packages that a file omits with all that they require. Only `Tokenizer.from_pretrained` of
tokenizers uses huggingface-hub, and nothing here calls that."""
SOURCE_ONLY = ("forbiddenfruit",)
"""Packages without wheels. All others must have one, so that nothing else is built."""
HEAD = "# {purpose} Written by `make lock` from pyproject.toml.\n"
PURPOSES = {
    "build": "Builds this package and those without wheels.",
    "test": "Everything for checks and tests (`make setup`).",
    "image": "The server with etcd and NATS (the image).",
    "run": "The server (`make run`). Complete: install it with --no-deps.",
    "nixl": "Transfers of KV blocks by NIXL (`make setup`). Install it with --no-deps.",
}


def main() -> int:
    """Write the files. Returns the exit status of `uv` if it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--uv", default="uv", help="path of the program uv")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    python = project["project"]["requires-python"].removeprefix(">=")
    options = [f"--python-version={python}", *(["--upgrade"] if args.upgrade else [])]
    FOLDER.mkdir(exist_ok=True)
    _compile(args.uv, "build", [*options, "-"], "\n".join(project["build-system"]["requires"]))
    for name, extras in LOCKS.items():
        constraints = [] if name == "test" else [f"--constraint={FOLDER / 'test.txt'}"]
        chosen = [f"--extra={extra}" for extra in extras]
        _compile(args.uv, name, [*options, *constraints, *chosen, "pyproject.toml"])
    # NIXL requires torch, which transfers between addresses do not use.
    nixl = project["project"]["optional-dependencies"]["nixl"]
    _compile(args.uv, "nixl", [*options, "--no-deps", "-"], "\n".join(nixl))
    return 0


def _compile(uv: str, name: str, options: Sequence[str], requirements: str = "") -> None:
    output = FOLDER / f"{name}.txt"
    command = [
        *(uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header"),
        *("--no-annotate", "--fork-strategy=fewest", "--only-binary=:all:"),
        *(f"--no-binary={package}" for package in SOURCE_ONLY),
        f"--output-file={output}",
        *options,
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        unused = UNUSED.get(name, ())
        overrides.write("".join(f"{package} ; python_version < '3'\n" for package in unused))
        overrides.flush()
        ended = subprocess.run(
            [*command, f"--override={overrides.name}"],
            cwd=ROOT,
            input=requirements,
            text=True,
            stdout=subprocess.DEVNULL,
            check=False,
        )
    if ended.returncode:
        sys.exit(ended.returncode)
    output.write_text(HEAD.format(purpose=PURPOSES[name]) + output.read_text())
    print(f"{output.relative_to(ROOT)} written")


if __name__ == "__main__":
    sys.exit(main())
