"""Standby processes that the free memory does not hold are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.standby import with_standbys
from dynamo.services.deployment import standby_memory


def specs(kind: str, standby: int, path: str = "") -> list[ChildSpec]:
    settings = Settings()
    engine = replace(settings.engine, kind=kind, standby=standby)
    settings = replace(settings, engine=engine, model=replace(settings.model, path=path))
    return with_standbys([ChildSpec(role="worker", name="worker", settings=settings)])


def test_a_number_beyond_memory_is_refused_with_the_largest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(standby_memory, "PROCESS_BYTES", 1 << 20)
    monkeypatch.setattr(standby_memory, "available_memory_bytes", lambda: 5 << 20)
    for kind, path, most in (("native", "", 5), ("vllm", str(tmp_path), 2), ("mock", "x", 5)):
        standby_memory.check_standby_memory(specs(kind, most, path))
        with pytest.raises(ConfigError, match="MiB of memory are free") as raised:
            standby_memory.check_standby_memory(specs(kind, most + 1, path))
        assert f"room for {most} in all" in raised.value.hint
    standby_memory.check_standby_memory(specs("vllm", 0, str(tmp_path)))
