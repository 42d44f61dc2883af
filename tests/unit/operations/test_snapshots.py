"""Snapshots that do not fit, drivers that cannot work, and what is said of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from dynamo.cli import main
from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.plugins import SNAPSHOT_DRIVERS
from dynamo.core.settings import Settings
from dynamo.inference.engines.compile_cache import cpu_features
from dynamo.operations.snapshot import folder as snapshot_folder
from dynamo.operations.snapshot.criu import Criu, Process
from dynamo.operations.snapshot.folder import SnapshotManifest, read_snapshot, save_snapshot


class FailingDriver:
    """A driver that saves nothing. `processes` are those that it was given."""

    processes: ClassVar[list[Process]] = []

    def check(self) -> None:
        """Works everywhere."""

    def save(self, process: Process, folder: Path) -> None:
        (folder / "half").write_bytes(b"of it")
        self.processes.append(process)
        raise OSError("the image is full")

    def restore(self, folder: Path, stdin: str) -> tuple[int, int]:
        raise OSError(f"{folder} has nothing for {stdin}")


class NamingDriver(FailingDriver):
    """A driver that saves the process id."""

    def save(self, process: Process, folder: Path) -> None:
        (folder / "process").write_text(str(process.pid))
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, driver in (("failing", FailingDriver), ("naming", NamingDriver)):
        row = f"{__name__}:{driver.__name__}"
        monkeypatch.setitem(SNAPSHOT_DRIVERS.builtin, name, row)  # type: ignore[arg-type]


@pytest.fixture
def settings(tiny_model: Path) -> Settings:
    """The settings of a mock engine."""
    settings = Settings()
    return replace(
        settings,
        model=replace(settings.model, path=str(tiny_model)),
        engine=replace(settings.engine, kind="mock"),
    )


@pytest.fixture
def manifest() -> SnapshotManifest:
    settings = {"model.path": "tiny", "engine.kind": "mock"}
    versions = snapshot_folder._versions()
    return SnapshotManifest("failing", "pipe:[1]", settings, versions, cpu_features())


def write(folder: Path, manifest: SnapshotManifest) -> Path:
    (folder / "snapshot.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def test_a_snapshot_that_fits_is_read(manifest: SnapshotManifest, tmp_path: Path) -> None:
    assert read_snapshot(write(tmp_path, manifest))[0] == manifest


@pytest.mark.parametrize("name", ["dynamo", "Python", "kernel"])
def test_a_snapshot_of_another_version_is_refused(
    manifest: SnapshotManifest, tmp_path: Path, name: str
) -> None:
    other = replace(manifest, versions={**manifest.versions, name: "0.0"})
    with pytest.raises(ConfigError, match=f"saved with {name} 0.0, not "):
        read_snapshot(write(tmp_path, other))


def test_a_snapshot_of_another_processor_is_refused(
    manifest: SnapshotManifest, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="processor with other features"):
        read_snapshot(write(tmp_path, replace(manifest, cpu="0")))


def test_a_changed_source_is_another_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def versions(source: str) -> Any:
        package = tmp_path / "dynamo"
        place = package / "operations" / "snapshot" / "folder.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        (package / "engine.py").write_text(source)
        monkeypatch.setattr(snapshot_folder, "__file__", str(place))
        return snapshot_folder._versions()["dynamo"]

    assert versions("a = 1") == versions("a = 1") != versions("a = 2")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no snapshot: No such file"), (b"{", "of this version")]
)
def test_a_folder_without_a_snapshot(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "snapshot.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_snapshot(tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_change_is_refused(
    manifest: SnapshotManifest, tmp_path: Path, mode: int
) -> None:
    write(tmp_path, manifest).chmod(mode)
    with pytest.raises(ConfigError, match="other users can change"):
        read_snapshot(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(manifest: SnapshotManifest, tmp_path: Path) -> None:
    os.chown(write(tmp_path, manifest), 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        read_snapshot(tmp_path)


def test_save_makes_one_folder_and_deletes_none(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "new.part").mkdir()
    (tmp_path / "new.part" / "mine").touch()
    folder = tmp_path / "new"
    saved = save_snapshot(folder, settings, "naming")
    assert read_snapshot(folder)[0] == saved
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "new.part"]
    assert (tmp_path / "new.part" / "mine").exists()


def test_the_working_folder_can_be_a_snapshot(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    saved = save_snapshot(Path(), settings, "naming")
    assert read_snapshot(tmp_path / "here")[0] == saved


def test_a_driver_that_fails_leaves_nothing(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ModelUnavailable, match="failing does not save the process: the image"):
        save_snapshot(tmp_path / "snapshot", settings, "failing")
    assert not list(tmp_path.iterdir())
    assert FailingDriver.processes.pop().returncode is not None


def test_a_process_that_cannot_load_its_model_says_why(tmp_path: Path, tiny_model: Path) -> None:
    settings = Settings()
    settings = replace(
        settings,
        model=replace(settings.model, path=str(tiny_model)),  # which has no weights
        engine=replace(settings.engine, kind="native"),
    )
    with pytest.raises(ModelUnavailable, match=r"no .*weights|safetensors"):
        save_snapshot(tmp_path / "snapshot", settings, "failing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "DIR", "out=native"], "engine.kind is 'native', and the snapshot was saved with"),
        (["load", "DIR", "other-model"], "model.path is 'other-model', and the snapshot"),
        (["load", "DIR/none"], "is no snapshot"),
        (["save", "DIR", "MODEL", "out=mock", "--driver", "failing"], "is not empty"),
        (["save", "DIR/snapshot.json", "MODEL", "out=mock", "--driver", "failing"], "is no folder"),
        (["save", "DIR/new", "MODEL", "out=mock", "--driver", "none"], "unknown snapshot driver"),
        (["save", "DIR/new", "MODEL", "out=echo"], "a snapshot of the engine 'echo' cannot be"),
        (["keep", "DIR"], "invalid choice: 'keep'"),
    ],
)
def test_wrong_usage_is_one_sentence(
    manifest: SnapshotManifest,
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    write(tmp_path, manifest)
    words = [
        word.replace("DIR", str(tmp_path)).replace("MODEL", str(tiny_model)) for word in arguments
    ]
    assert main(["snapshot", *words]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`program(script)`: the `criu` that is found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write_program(script: str) -> None:
        path = tmp_path / "criu"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)

    return write_program


def test_criu_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.operations.snapshot.criu.shutil.which", lambda name, path: None)
    with pytest.raises(ConfigError, match="criu is not installed") as caught:
        Criu().check()
    assert caught.value.hint is not None
    assert "install CRIU 4" in caught.value.hint


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        ("CRIU needs to have the CAP_SYS_ADMIN capability", "has no right", "as root"),
        ("Error (criu/cr-check.c:1): Kernel doesn't support it", "doesn't support it", "CRIU 4"),
    ],
)
def test_criu_that_cannot_work(
    program: Callable[[str], None], output: str, message: str, hint: str
) -> None:
    program(f'echo "{output}" >&2; exit 1')
    with pytest.raises(ConfigError, match=message) as caught:
        Criu().check()
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_the_cause_of_a_failed_restore_is_read_from_the_log(
    program: Callable[[str], None], tmp_path: Path
) -> None:
    program(
        'while [ "$1" != --work-dir ]; do shift; done\n'
        """cat > $2/criu.log <<'END'
Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
7: Error (criu/files-reg.c:2): Can't open file lib/x.so on restore: No such file or directory
Error (criu/cr-restore.c:2331): Restoring FAILED.
END
exit 1"""
    )
    with pytest.raises(OSError, match=r"^Can't open file lib/x.so on restore: No such file") as _:
        Criu().restore(tmp_path, "pipe:[1]")
