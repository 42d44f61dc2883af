"""Inputs of adapters of foreign engines."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo.core.clock import SystemClock
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engine_registry import EngineInputs
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef


def make_inputs(kind: str, folder: Path, block_tokens: int = 4, **engine: Any) -> EngineInputs:
    """Return inputs for a model of 100 ids in `folder`."""
    settings = Settings(engine=EngineSettings(kind=kind, **engine))
    tokenizer = FileRef("tokenizer.json", "0" * 64, 1, str(folder / "tokenizer.json"))
    card = ModelCard(("m",), 90, 100, tokenizer, block_tokens, eos_token_ids=(2,))
    files: Any = SimpleNamespace(path=folder)
    return EngineInputs(settings, card, files, SystemClock())


def install_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Let imports of `name` find a module with these members."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)
