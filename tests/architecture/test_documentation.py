"""Settings, commands, errors, metrics and dependencies are documented, and links lead to files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.cli.commands import COMMANDS
from dynamo.core.errors import error_types
from dynamo.core.settings.keys import environment_name, setting_specs_by_key
from dynamo.inference.native.kv_storage import KvShape
from dynamo.models.checkpoint.decoder_config import DecoderConfig
from dynamo.models.downloads.wheel_models import DEFAULT_MODEL
from dynamo.operations.bench.traces import read_trace_sessions
from dynamo.services.deployment.launch import DEFAULT_OPEN_FILES

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
METRIC = re.compile(r"(dynamo|process|python)(_[a-z0-9]+)+\Z")
UNITS = (
    "total",
    "seconds",
    "bytes",
    "tokens",
    "requests",
    "blocks",
    "workers",
    "fds",
    "ratio",
    "state",
    "threads",
    "processes",
    "active",
    "info",
    "watts",
    "celsius",
)


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def metrics() -> Iterator[str]:
    for line in (REFERENCE / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            yield line.split("`")[1]


def test_every_setting_is_in_the_reference_and_says_what_it_does() -> None:
    text = (REFERENCE / "settings.md").read_text()

    for key, declared in setting_specs_by_key().items():
        assert declared.meta.help
        if "." in key:
            assert f"`{key}`<br>`{environment_name(key)}`" in text


def test_no_flag_or_alias_is_declared_twice() -> None:
    flags = [spec.meta.flag for spec in setting_specs_by_key().values() if spec.meta.flag]

    assert len(flags) == len(set(flags))


def test_every_command_and_error_is_in_the_reference() -> None:
    commands = (REFERENCE / "commands.md").read_text()
    errors = (REFERENCE / "errors.md").read_text()

    assert all(
        f"## dynamo {name}\n" in commands
        for name, command in COMMANDS.items()
        if not command.hidden
    )
    assert all(f"| `{code}` |" in errors for code in error_types())


def test_metrics_bear_names_with_units() -> None:
    names = list(metrics())

    assert len(names) > 20
    assert [name for name in names if not METRIC.match(name)] == []
    assert [name for name in names if not name.endswith(UNITS)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if not target.startswith("http")]

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_dependency_is_explained() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    text = (ROOT / "docs" / "dependencies.md").read_text()

    assert [name for name in declared if f"| {re.split('[>=<]', name)[0]} |" not in text] == []


def test_the_requirements_name_the_sizes_of_the_default_model() -> None:
    """The figures follow from the code: sizes of files and of `make setup`, weights, KV memory."""
    text = (ROOT / "docs" / "requirements.md").read_text()
    config = DecoderConfig(576, 1536, 30, 9, 3, 64, 49152, 8192, 1e-5, 1e5, tied=True)
    file_mb, fetched_mb = DEFAULT_MODEL.file_bytes / 1e6, DEFAULT_MODEL.wheel_bytes / 1e6
    weights, kv_mb = config.count_weights(), 1000 * KvShape(30, 3, 64).token_bytes / 1e6

    assert f"Q4_1) | {file_mb:.0f} |" in text
    assert f"deleted afterwards | {fetched_mb:.0f} |" in text
    row = f"| {weights / 1e6:.0f} million | {file_mb:.0f} (Q4_1) | {weights * 4 / 1e9:.2f} | "
    assert f"{row}{kv_mb:.0f} |" in text
    assert f"hard limit of {DEFAULT_OPEN_FILES:,} or more" in text
    makefile = (ROOT / "Makefile").read_text()
    run_mb, all_mb = map(int, re.findall(r"into \$\(VENV\), (\d+) MB", makefile))
    assert f"with `.venv` | {run_mb} |" in text
    assert f"(`make setup`) | {all_mb - run_mb} |" in text


def test_the_example_trace_is_what_its_program_makes(tmp_path: Path) -> None:
    traces = ROOT / "examples" / "traces"
    program = tmp_path / "make_trace.py"
    program.write_text((traces / "make_trace.py").read_text())
    subprocess.run([sys.executable, program], check=True)

    lines = (tmp_path / "conversations.jsonl").read_text()
    assert lines == (traces / "conversations.jsonl").read_text()
    sessions = read_trace_sessions(str(traces / "conversations.jsonl"))
    assert sum(len(session) for session in sessions) == lines.count("\n")
