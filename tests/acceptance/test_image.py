"""The steps of deploy/Dockerfile, run into a fresh folder instead of an image, without Docker.

Only the steps that need root (system packages and the user) are left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import free_port, until

ROOT = Path(__file__).parents[2]
AS_ROOT = ("apt-get ", "useradd ")
ABSOLUTE = re.compile(r"(?<![\w.$}])/(?=(?:requirements|src|config|opt|home)\b)")


def instructions() -> Iterator[tuple[str, str]]:
    """Yield every instruction of the file with its words on one line."""
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


class Image:
    """A folder with the files of the image, and a virtual environment instead of its Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workdir = folder
        self.command: list[str] = []
        venv = folder / "usr" / "local"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DYNAMO_", "PYTHON", "VIRTUAL_ENV"))
        }
        self.environ["PATH"] = f"{venv / 'bin'}:/usr/bin:/bin"
        self.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
        (folder / "run").mkdir(mode=0o700)

    def build(self) -> list[str]:
        """Run the instructions. Return the commands that were left out."""
        omitted = []
        for name, rest in instructions():
            if name == "COPY":
                self.copy(rest.split())
            elif name == "RUN":
                for command in rest.split("&&"):
                    if command.strip().startswith(AS_ROOT) or "/var/lib/apt" in command:
                        omitted.append(command.strip())
                    else:
                        self.run(command)
            elif name == "WORKDIR":
                self.workdir = self.inside(rest)
            elif name == "CMD":
                self.command = json.loads(rest)
        return omitted

    def inside(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def copy(self, words: list[str]) -> None:
        *sources, target = words
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, self.inside(target), dirs_exist_ok=True)
            else:
                self.inside(target).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.inside(target))

    def run(self, command: str) -> None:
        line = ABSOLUTE.sub(f"{self.folder}/", command)
        ended = subprocess.run(
            ["bash", "-euc", line],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, (line, ended.stderr[-2000:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_native_image_serves(tmp_path: Path, tiny_model: Path) -> None:
    tmp_path.chmod(0o700)
    image = Image(tmp_path)
    omitted = image.build()
    assert len(omitted) == 4, omitted
    assert not (tmp_path / "src").exists()
    assert image.command[:2] == ["dynamo", "run"]

    port = free_port()
    words = ["out=echo", str(tiny_model), "--http-host", "127.0.0.1", "--http-port", str(port)]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [*image.command, *words],
            env=image.environ,
            cwd=image.workdir,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            until(lambda: "is served at" in (tmp_path / "log").read_text() or process.poll())
            assert process.poll() is None, (tmp_path / "log").read_text()
            body = {"model": "default", "prompt": "abc", "max_tokens": 2}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 2
        finally:
            process.terminate()
