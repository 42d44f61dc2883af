"""State folders, process records, ports and pids."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from dynamo.communication.discovery.folder import FolderLease, record_file_name
from dynamo.communication.http import PortInUse
from dynamo.core.errors import ConfigError
from dynamo.core.host.pids import command_line, is_alive, start_ticks
from dynamo.core.settings import Settings
from dynamo.runtime.deployment import (
    Deployment,
    ProcessRecord,
    deployment_of,
    live_deployments,
    live_processes,
)
from dynamo.runtime.processes.ports import check_port_free, port_owner, reserve_port


def record_of(deployment: Deployment, **fields: object) -> ProcessRecord:
    values = {
        "deployment": deployment.id,
        "role": "worker",
        "name": "worker-1",
        "pid": os.getpid(),
        "instance": "i1",
        "start_ticks": start_ticks(os.getpid()),
    }
    return ProcessRecord(**(values | fields))  # type: ignore[arg-type]


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    new = deployment_of(Settings(), {"XDG_RUNTIME_DIR": str(tmp_path)})
    new.create_folder()
    return new


def test_the_folder_is_private_and_named_after_the_port(
    deployment: Deployment, tmp_path: Path
) -> None:
    assert deployment.folder == tmp_path / "dynamo" / "http-8000"
    assert deployment.folder.stat().st_mode & 0o777 == 0o700
    assert deployment.discovery_url == f"file:{deployment.folder}/discovery"


def test_a_record_that_another_user_wrote_is_left_out(deployment: Deployment) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    deployment.write_record(record_of(deployment))
    (record,) = (deployment.folder / "processes").iterdir()
    os.chown(record, 65534, 65534)
    assert deployment.live_processes() == []
    assert record.exists()


def test_a_linked_deployment_inside_a_safe_root_is_not_listed(
    deployment: Deployment, tmp_path: Path
) -> None:
    shared = Deployment("shared", tmp_path / "shared")
    shared.write_record(record_of(shared))
    (deployment.folder.parent / "linked").symlink_to(shared.folder)
    listed = live_deployments({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert "linked" not in [item.id for item in listed]
    assert shared.live_processes()


def test_a_record_of_another_users_process_counts_as_dead(deployment: Deployment) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    with subprocess.Popen(["sleep", "30"], user=65534) as stranger:
        ticks = start_ticks(stranger.pid)
        deployment.write_record(record_of(deployment, pid=stranger.pid, start_ticks=ticks))
        assert deployment.live_processes() == []
        stranger.kill()


def test_a_folder_open_to_others_is_made_private(deployment: Deployment) -> None:
    deployment.folder.chmod(0o755)
    deployment.create_folder()
    assert deployment.folder.stat().st_mode & 0o777 == 0o700


def test_live_processes_are_listed_supervisor_first(deployment: Deployment, tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    deployment.write_record(record_of(deployment))
    deployment.write_record(
        record_of(deployment, instance="i2", role="supervisor", name="supervisor")
    )
    deployment.write_record(record_of(deployment, state="ready"))
    mine = [record for record in live_processes(environ) if record.pid == os.getpid()]
    assert [(record.role, record.state) for record in mine] == [
        ("supervisor", "starting"),
        ("worker", "ready"),
    ]
    assert deployment in live_deployments(environ)
    for record in mine:
        deployment.remove_record(record)
    assert deployment not in live_deployments(environ)


def test_records_of_dead_processes_are_removed(deployment: Deployment) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    deployment.write_record(record_of(deployment, pid=ended.pid, instance="dead"))
    deployment.write_record(record_of(deployment, start_ticks=1, instance="reused pid"))
    (deployment.folder / "processes" / "junk.json").write_bytes(b"{")
    assert deployment.live_processes() == []
    assert [path.name for path in (deployment.folder / "processes").iterdir()] == ["junk.json"]


def test_a_process_is_identified_by_pid_and_start_time() -> None:
    assert is_alive(os.getpid(), start_ticks(os.getpid()))
    assert not is_alive(os.getpid(), start_ticks(os.getpid()) - 1)
    assert start_ticks(2**22 + 1) == 0
    assert command_line(2**22 + 1) == ""


def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child.pid) == 0
    child.wait()


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_in_use_names_its_owner(shared: bool) -> None:
    with socket.socket() as listener:
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        owner = port_owner(port)
        assert owner is not None
        assert owner.pid == os.getpid()
        with pytest.raises(PortInUse) as caught:
            check_port_free("127.0.0.1", port)
        assert f"process {os.getpid()} (" in caught.value.message
    assert check_port_free("127.0.0.1", port) == port
    assert port_owner(port) is None


def test_port_0_is_any_free_port_and_bad_addresses_are_named() -> None:
    assert check_port_free("127.0.0.1", 0) > 0
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        check_port_free("203.0.113.7", 1234)


def test_a_reserved_port_is_shared_only_by_reuseport() -> None:
    with reserve_port("localhost", 0) as reservation:
        port = reservation.getsockname()[1]
        with pytest.raises(PortInUse):
            check_port_free("127.0.0.1", port)
        with socket.socket() as child:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                child.setsockopt(socket.SOL_SOCKET, option, 1)
            child.bind(("127.0.0.1", port))
            child.listen()
            with pytest.raises(PortInUse):
                check_port_free("127.0.0.1", port)
            with socket.create_connection(("127.0.0.1", port)) as caller:
                accepted, _ = child.accept()
                accepted.close()  # closes first, so that TIME_WAIT stays on this side
                assert caller.recv(1) == b""
    assert check_port_free("127.0.0.1", port) == port


def test_an_unused_folder_is_removed(deployment: Deployment) -> None:
    record = record_of(deployment)
    deployment.write_record(record)
    deployment.remove_if_unused()
    assert deployment.live_processes() == [record]

    deployment.remove_record(record)
    deployment.remove_if_unused()
    assert not deployment.folder.exists()
    deployment.remove_if_unused()


def write_killed_deployment(deployment: Deployment) -> ProcessRecord:
    """Write the files that a deployment leaves when it is killed during a write."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    record = record_of(deployment, pid=ended.pid)
    deployment.write_record(record)
    (deployment.folder / "processes" / "i1.new").touch()
    with socket.socket(socket.AF_UNIX) as control, chdir(deployment.folder):
        control.bind("control")  # a whole path may be too long
    lease = deployment.folder / "discovery" / "0123456789abcdef"
    lease.mkdir(parents=True)
    (lease / "lock").touch()
    (lease / record_file_name("/key")).write_bytes(b"/key\nvalue")
    return record


def test_listing_processes_removes_the_files_of_a_killed_deployment(
    deployment: Deployment, tmp_path: Path
) -> None:
    record = write_killed_deployment(deployment)
    assert record not in live_processes({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert not deployment.folder.exists()


def test_a_live_lease_keeps_the_folder(deployment: Deployment) -> None:
    write_killed_deployment(deployment)
    lease = FolderLease(deployment.folder / "discovery")
    lease.put("/alive", b"")
    deployment.remove_if_unused()
    assert lease.is_intact()
    assert (lease.folder / record_file_name("/alive")).exists()
    assert not (deployment.folder / "discovery" / "0123456789abcdef").exists()
    lease.close()
    deployment.remove_if_unused()
    assert not deployment.folder.exists()


def test_a_record_written_after_removal_creates_the_folder(deployment: Deployment) -> None:
    deployment.remove_if_unused()
    assert not deployment.folder.exists()
    record = record_of(deployment)
    deployment.write_record(record)
    assert deployment.live_processes() == [record]


def test_no_folder_is_removed_while_a_record_is_written(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_folder = Deployment.create_folder

    def create_and_remove(target: Deployment) -> None:
        create_folder(target)
        target.remove_if_unused()

    monkeypatch.setattr(Deployment, "create_folder", create_and_remove)
    deployment.write_record(record_of(deployment))
    assert len(deployment.live_processes()) == 1


def test_a_port_in_use_names_the_deployment(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deployment.folder.parents[1]))
    deployment.write_record(record_of(deployment))
    with socket.create_server(("127.0.0.1", 0)) as reservation, pytest.raises(PortInUse) as caught:
        check_port_free("127.0.0.1", reservation.getsockname()[1])
    assert f"deployment http-8000 (process {os.getpid()}) serves there" in caught.value.message
    assert "`dynamo stop http-8000`" in caught.value.hint


def test_a_reserved_port_without_a_listener_names_the_deployment(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deployment.folder.parents[1]))
    with reserve_port("127.0.0.1", 0) as reservation:
        port = reservation.getsockname()[1]
        deployment.write_record(record_of(deployment, address=f"http://127.0.0.1:{port}"))
        with pytest.raises(PortInUse, match=r"deployment http-8000 \(process"):
            check_port_free("127.0.0.1", port)


def test_a_full_disk_names_the_state_folder(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=f"{deployment.folder} cannot be written: No space"):
        deployment.write_record(record_of(deployment))


def test_a_state_folder_that_cannot_be_created_raises(tmp_path: Path) -> None:
    blocking_file = tmp_path / "file"
    blocking_file.touch()
    with pytest.raises(ConfigError, match="cannot be created") as caught:
        Deployment("one", blocking_file / "dynamo" / "one").create_folder()
    assert "XDG_RUNTIME_DIR" in caught.value.hint


def test_a_deleted_record_is_written_again(deployment: Deployment) -> None:
    record = record_of(deployment)
    deployment.write_record(record)
    old = deployment.folder / "processes" / "i1.json"
    os.utime(old, (1, 1))

    deployment.refresh_record(record)
    assert old.stat().st_mtime > 1

    shutil.rmtree(deployment.folder.parent)
    deployment.refresh_record(record)
    assert deployment.live_processes() == [record]
