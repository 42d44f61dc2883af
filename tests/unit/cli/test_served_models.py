"""`dynamo add`: the words and flags of a model."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo.cli.models.served import ADD, MODELS, model_entry_of
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings, SourcedValue
from dynamo.services.deployment.added_models import added_model_specs, save_model


def entry_of(*arguments: str) -> dict[str, Any]:
    args = ADD.parser().parse(arguments)
    flags = {key: value for key, value in vars(args).items() if isinstance(value, SourcedValue)}
    return model_entry_of(args.words, flags)


def test_flags_become_an_entry_of_models(tiny_model: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tiny_model.parent)
    entry = entry_of(
        "out=mock", tiny_model.name, "--model-name", "a", "--model-name", "b", "--workers", "2",
        "--engine-arg", "x=1", "--max-model-len", "64",
    )  # fmt: skip

    assert entry["path"] == str(tiny_model)
    specs = added_model_specs(Settings(), entry, 3)
    assert [(spec.name, spec.model) for spec in specs] == [("a-worker-1", "a"), ("a-worker-2", "a")]
    settings = specs[0].settings
    assert (settings.model.names, settings.model.context_tokens) == (("a", "b"), 64)
    assert (settings.engine.kind, settings.engine.args) == ("mock", {"x": 1})
    assert settings.worker_count == 5  # with which it shares the host's memory


def test_groups_of_an_added_model(tiny_model: Path) -> None:
    words = ("out=mock", str(tiny_model), "--model-name", "a", "--prefill-workers", "2")
    specs = added_model_specs(Settings(), entry_of(*words, "--decode-workers", "1"), 0)

    assert [(spec.name, spec.settings.engine.role) for spec in specs] == [
        ("a-prefill-worker-1", "prefill"),
        ("a-prefill-worker-2", "prefill"),
        ("a-decode-worker", "decode"),
    ]
    with pytest.raises(ConfigError, match="no worker that computes answers"):
        added_model_specs(Settings(), entry_of(*words), 0)


def test_an_added_model_has_standby_processes_unless_a_server_has_it(tiny_model: Path) -> None:
    settings = Settings()
    settings = replace(settings, engine=replace(settings.engine, standby=1))

    def names(*words: str) -> list[str]:
        entry = entry_of(*words, "--model-name", "third")
        return [spec.name for spec in added_model_specs(settings, entry, 0)]

    assert names("out=mock", str(tiny_model)) == ["third-worker", "third-worker-standby-1"]
    assert names("out=openai", "http://10.0.0.1:1") == ["third-worker"]


def test_a_model_without_a_name_of_its_own_needs_one() -> None:
    with pytest.raises(ConfigError, match="no name") as caught:
        added_model_specs(Settings(), entry_of("out=openai", "http://10.0.0.1:1"), 0)
    assert "--model-name" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b"), "two models: 'a' and 'b'"),
        (("a", "--router-mode", "kv"), "--router-mode is about the whole deployment"),
        (("a", "--flexible-workers", "2"), "--flexible-workers is about the whole deployment"),
    ],
)
def test_wrong_words_of_add_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entry_of(*arguments)


def test_an_alias_without_a_model_is_refused() -> None:
    for word in ("chat", "chat=", "=qwen"):
        with pytest.raises(ConfigError, match="is not ALIAS=MODEL"):
            MODELS.run(["--alias", word])


def test_a_saved_model_leaves_the_file_as_private_as_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "models.yaml", tmp_path / "link.yaml"
    file.write_text("models:\n- path: /a\n")
    file.chmod(0o640)
    link.symlink_to(file)
    save_model(str(link), {"path": "/b"}, "")
    assert "/b" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


def test_a_file_that_cannot_be_written_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n- path: /a\n")

    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(ConfigError, match="is not changed: No space left on device"):
        save_model(str(file), {"path": "/b"}, "")
    assert [each.name for each in tmp_path.iterdir()] == ["models.yaml"]
    assert "/b" not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nowhere", "--adapter-of", "a"), "/nowhere is no folder on this host"),
        (("http://x:1", "--adapter-of", "a"), "an adapter has no engine.urls of its own"),
        ((".", "--adapter-of", "a", "out=mock"), "an adapter has no engine.kind of its own"),
        ((".", "--adapter-of", "a", "--model-name", "x", "--model-name", "y"), "one name and not"),
    ],
)
def test_what_is_no_adapter_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ADD.run(arguments)
