"""`python -m dynamo.testing.kubernetes` as a process, and kubectl for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KUBECTL = Path(sysconfig.get_path("scripts")) / "kubectl"


@contextmanager
def laptop_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of kubectl and helm for a cluster that is a process of its own."""
    env = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.testing.kubernetes"], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search("KUBECONFIG=(.+)", line):
            yield {**env, "KUBECONFIG": match[1], "HOME": str(folder)}
            break
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert not list(folder.glob("kube-*"))


def kubectl(env: dict[str, str], *arguments: str, text: str = "") -> str:
    """Return what kubectl prints."""
    done = subprocess.run(
        [KUBECTL, *arguments], env=env, input=text, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
