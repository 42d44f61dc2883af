"""The check of the transfer plane by `dynamo doctor`, without and with running workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dynamo.communication.transfer import MemoryRegion, RegionDescriptor
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.operations.doctor import checks as doctor
from dynamo.runtime.distributed import DistributedRuntime


def settings_of(folder: Path, **runtime: str) -> Settings:
    return Settings(runtime=RuntimeSettings(discovery=f"file:{folder}", **runtime))


def test_each_backend_is_tried(tmp_path: Path) -> None:
    finding = doctor.transfer(settings_of(tmp_path / "nothing"))
    assert finding.verdict == "ok"
    assert finding.message.startswith("auto: shm ")
    assert ", tcp " in finding.message
    assert "workers" not in finding.message
    assert not (tmp_path / "nothing").exists()


def test_a_backend_that_does_not_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.communication.transfer.shm._check_user", _refuse)
    finding = doctor.transfer(settings_of(tmp_path / "nothing"))
    assert "not shm" in finding.message
    assert ", tcp " not in finding.message


@pytest.mark.parametrize("scheme", ["tcp", "nixl"])
def test_a_url_that_names_one_backend_tries_that_one(tmp_path: Path, scheme: str) -> None:
    finding = doctor.transfer(settings_of(tmp_path / "nothing", transfer=f"{scheme}:"))
    assert finding.message.startswith(f"{scheme}: {scheme} ")
    assert "shm" not in finding.message


@pytest.mark.parametrize(
    ("shm", "verdict", "expected"),
    [
        (None, "ok", "running workers: 1 by shm"),
        ("shm://elsewhere/x", "ok", "1 by tcp (not shm: the peer"),
        ("", "warn", "1 by none"),
    ],
    ids=["here", "on another host", "out of reach"],
)
async def test_running_workers_are_connected(
    tmp_path: Path, shm: str | None, verdict: str, expected: str
) -> None:
    settings = settings_of(tmp_path)
    region = MemoryRegion.allocate(2, 1000)
    async with await DistributedRuntime.create(settings, role="worker") as runtime:
        plane = await runtime.open_transfer()
        descriptor = await plane.expose(region, "some layout")
        if shm is not None:
            endpoints: Sequence[str] = (shm, descriptor.endpoints[1]) if shm else ()
            descriptor = msgspec.structs.replace(descriptor, endpoints=tuple(endpoints))
        await _announce(runtime, descriptor)
        finding = await asyncio.to_thread(doctor.transfer, settings)
    region.close()
    assert finding.verdict == verdict, finding
    assert expected in finding.message


async def _announce(runtime: DistributedRuntime, descriptor: RegionDescriptor) -> None:
    async def handler(payload: bytes, writer: object) -> None:
        del payload, writer

    endpoint = runtime.namespace().component("worker").endpoint("prefill")
    capabilities = {"transfer": [msgspec.to_builtins(descriptor)]}
    await endpoint.serve(handler, capabilities=capabilities)


def _refuse(_: object) -> None:
    raise PermissionError("not this user")
