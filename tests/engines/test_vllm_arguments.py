"""The table of arguments and the checks of the package, on an installed vLLM."""

from __future__ import annotations

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings
from dynamo.inference.engines.arguments import VLLM, PassedSetting, engine_arguments
from dynamo.inference.engines.packages import argument_names, engine_status


def test_every_argument_of_the_table_exists() -> None:
    rows = {row.name for row in VLLM.values() if isinstance(row, PassedSetting)}

    assert not rows - argument_names("vllm")


def test_the_installed_version_is_usable() -> None:
    status = engine_status("vllm")

    assert (status.problem, status.is_installed) == ("", True)


def test_an_unknown_argument_names_the_nearest() -> None:
    engine = EngineSettings(kind="vllm", args={"gpu_memory_utilisation": 0.5})

    with pytest.raises(ConfigError) as caught:
        engine_arguments(Settings(engine=engine))

    assert caught.value.hint == "did you mean 'gpu_memory_utilization'?"
