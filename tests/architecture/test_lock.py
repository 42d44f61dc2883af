"""The pinned packages (requirements/*.txt) satisfy pyproject.toml, and every pin has hashes."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    "run": (),
    "image": ("etcd", "nats", "s3", "zstd"),
    "test": ("etcd", "nats", "test", "check"),
    "nixl": ("nixl",),
}
FILES = ("build", *EXTRAS)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PIN = re.compile(
    r"^(?P<pin>[^\s#][^\\]*?) \\\n(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    re.MULTILINE,
)


def pins(name: str) -> list[Requirement]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return [Requirement(match["pin"]) for match in PIN.finditer(text)]


def declared(name: str) -> list[str]:
    if name == "build":
        return list(PROJECT["build-system"]["requires"])
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    own = [] if name == "nixl" else project["dependencies"]
    return [*own, *(line for extra in EXTRAS[name] for line in extras[extra])]


def test_every_line_is_a_pin_with_hashes() -> None:
    for name in FILES:
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        rest = PIN.sub("", text).splitlines()
        assert [line for line in rest if not line.startswith("# ")] == [], name
        assert all(str(pin.specifier).startswith("==") for pin in pins(name))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_bounds(name: str, python: str) -> None:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    versions = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pins(name)
        if pin.marker is None or pin.marker.evaluate(environment)
    }
    for line in declared(name):
        requirement = Requirement(line)
        version = versions.get(canonicalize_name(requirement.name))
        assert version, f"{line} is not in requirements/{name}.txt: run make lock"
        assert requirement.specifier.contains(version), f"{line}, but {version} is pinned"


def test_all_files_have_the_same_versions() -> None:
    tested = {str(pin) for pin in pins("test")}

    assert {str(pin) for pin in pins("run")} <= {str(pin) for pin in pins("image")}
    assert {str(pin).partition(";")[0] for pin in pins("image")} <= {
        text.partition(";")[0] for text in tested
    }


def test_the_server_is_pinned_completely_and_without_the_hub() -> None:
    names = {canonicalize_name(pin.name) for pin in pins("run")}
    for name in names:
        requirements = map(Requirement, metadata.requires(name) or ())
        required = {
            canonicalize_name(line.name)
            for line in requirements
            if line.marker is None or line.marker.evaluate({"extra": ""})
        }
        assert required - names <= {"huggingface-hub"}, name
    assert names.isdisjoint({"huggingface-hub", "hf-xet", "fsspec", "filelock", "tqdm"})


def test_make_and_the_image_install_only_files_with_hashes() -> None:
    recipes = (ROOT / "Makefile").read_text() + (ROOT / "deploy" / "Dockerfile").read_text()
    lines = [line for line in recipes.splitlines() if "pip install" in line or "$(PIP) " in line]
    apart = ("-oracle", "-lock", "$(CLIENTS)")  # environments that serve no user
    installs = [line for line in lines if not any(name in line for name in apart)]

    assert len(installs) >= 6
    for line in installs:
        assert re.search(r"--require-hashes|--no-deps --no-build-isolation|^PIP ", line), line
