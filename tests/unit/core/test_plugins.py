"""Tables of implementations: built-in rows, entry points and unknown names."""

from __future__ import annotations

from importlib import metadata

import pytest

from dynamo.core.errors import ConfigError
from dynamo.core.plugins import (
    DISCOVERY_BACKENDS,
    ENGINES,
    EVENT_BACKENDS,
    OPERATORS,
    REQUEST_BACKENDS,
    ROUTER_COSTS,
    ROUTER_MODES,
    SELECTORS,
    TRANSFER_BACKENDS,
    PluginTable,
    engine_needs_weights,
)
from dynamo.core.settings.load import resolve_settings

TABLES = [
    ENGINES,
    DISCOVERY_BACKENDS,
    REQUEST_BACKENDS,
    EVENT_BACKENDS,
    TRANSFER_BACKENDS,
    ROUTER_MODES,
    ROUTER_COSTS,
    SELECTORS,
    OPERATORS,
]


class FakeEntryPoint:
    """Stands for an entry point of an installed package."""

    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self.value = "fake_package:thing"
        self._loaded = loaded

    def load(self) -> object:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


@pytest.fixture
def install(monkeypatch):
    """Install entry points into one group: `install(group, name=object, ...)`."""

    def add(wanted_group: str, **objects: object) -> None:
        points = [FakeEntryPoint(name, loaded) for name, loaded in objects.items()]
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: points if group == wanted_group else []
        )

    return add


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_every_builtin_row_can_be_imported(table: PluginTable) -> None:
    for name in table.builtin:
        assert callable(table.load(name))


def test_an_entry_point_adds_a_name_to_its_own_table_only(install) -> None:
    factory = object()
    install("dynamo.engines", mine=factory)
    assert ENGINES.load("mine") is factory
    assert "mine" in ENGINES.names()
    with pytest.raises(ConfigError, match="unknown selector 'mine'"):
        SELECTORS.load("mine")


def test_an_entry_point_does_not_replace_a_builtin_row(install) -> None:
    install("dynamo.engines", mock=object())
    assert ENGINES.load("mock").__module__ == "dynamo.inference.mock.engine"


def test_an_entry_point_that_cannot_be_imported_names_its_target(install) -> None:
    install("dynamo.engines", mine=ImportError("no such file"))
    with pytest.raises(ConfigError, match=r"fake_package:thing.*no such file"):
        ENGINES.load("mine")


def test_an_engine_of_an_entry_point_says_whether_it_needs_weights(install) -> None:
    async def with_weights() -> None: ...

    async def without_weights() -> None: ...

    without_weights.needs_weights = False  # type: ignore[attr-defined]
    install("dynamo.engines", heavy=with_weights, light=without_weights)
    needs = {kind: engine_needs_weights(kind) for kind in ("native", "mock", "heavy", "light")}
    assert needs == {"native": True, "mock": False, "heavy": True, "light": False}


def test_a_router_mode_of_an_entry_point_is_a_valid_setting(install) -> None:
    with pytest.raises(ConfigError, match=r"router\.mode"):
        resolve_settings(environ={"DYNAMO_ROUTER__MODE": "mine"})
    install("dynamo.router.modes", mine=object())
    assert resolve_settings(environ={"DYNAMO_ROUTER__MODE": "mine"}).settings.router.mode == "mine"


def test_operators_of_entry_points_are_listed_in_a_setting(install) -> None:
    environ = {"DYNAMO_ROUTER__OPERATORS": "admission,mine"}
    with pytest.raises(ConfigError, match=r"router\.operators.*mine is none of: admission, migr"):
        resolve_settings(environ=environ)
    install("dynamo.operators", mine=object())
    assert resolve_settings(environ=environ).settings.router.operators == ("admission", "mine")
    with pytest.raises(ConfigError, match="mine may be listed once"):
        resolve_settings(environ={"DYNAMO_ROUTER__OPERATORS": "mine,mine"})
