"""`dynamo doctor --network` reads the limits of buffers and the cards for RDMA."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamo.operations.doctor.network import MIN_BUFFER_BYTES, check_network

SMALL = {
    "net/core/rmem_max": "212992\n",
    "net/core/wmem_max": "212992\n",
    "net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
    "net/ipv4/tcp_wmem": "4096\t16384\t4194304\n",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_small_buffers_are_a_warning_that_the_named_command_mends(tmp_path: Path) -> None:
    sysctl = write(tmp_path / "sys", SMALL)
    findings = [each for each in check_network(sysctl, tmp_path) if each.check.startswith("net.")]
    assert [each.verdict for each in findings] == ["warn"] * 4
    for finding in findings:
        command = finding.hint.rpartition("sysctl -w ")[2]
        key, value = command.split("=")
        write(sysctl, {key.replace(".", "/"): value.strip("'")})
    assert "net.ipv4.tcp_rmem='4096 131072 16777216'" in findings[2].hint
    assert {each.verdict for each in check_network(sysctl, tmp_path)} == {"ok"}


def test_what_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    findings = list(check_network(tmp_path, tmp_path))
    assert [each.message for each in findings[:4]] == ["cannot be read"] * 4
    assert findings[4].message == "no card for RDMA"


def test_ports_of_cards_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysctl = write(tmp_path / "sys", dict.fromkeys(SMALL, str(MIN_BUFFER_BYTES)))
    cards = write(
        tmp_path / "cards",
        {
            "mlx5_0/ports/1/state": "4: ACTIVE\n",
            "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "mlx5_1/ports/1/state": "1: DOWN\n",
            "mlx5_1/ports/1/rate": "40 Gb/sec (4X QDR)\n",
        },
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    active, down, memory = list(check_network(sysctl, cards))[4:]
    assert (active.verdict, active.message) == (
        "ok", "mlx5_0 port 1: 4: ACTIVE, 400 Gb/sec (4X NDR)",
    )  # fmt: skip
    assert (down.verdict, down.hint) == ("warn", "look at the cable, the switch, and ibstat")
    assert memory.hint.startswith("ulimit -l unlimited")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    write(cards, {"mlx5_1/ports/1/state": "4: ACTIVE"})
    assert {each.verdict for each in check_network(sysctl, cards)} == {"ok"}
