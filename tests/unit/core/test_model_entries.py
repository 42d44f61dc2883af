"""The list `models` of a settings file: how commands change it."""

from __future__ import annotations

import pytest

from dynamo.core.adapters import parse_lora_modules
from dynamo.core.errors import ConfigError
from dynamo.core.settings.document import edit_adapters, edit_alias, edit_models
from dynamo.core.settings.load import resolve_settings

TEXT = """\
models:  # all of them
  - path: /a
    name: a
  # the second
  - {path: /b, names: [b, c]}

# about the server
server: {http_port: 1}
"""
ENTRY = {"path": "/d", "names": ["d"], "engine.kind": "mock", "prefill_workers": [{"replicas": 2}]}


def paths(text: str) -> list[str]:
    return [entry.path for entry in resolve_settings(document=(text, "x")).settings.models]


def test_an_entry_is_added_behind_the_last_one() -> None:
    changed = edit_models(TEXT, ENTRY, "")

    assert paths(changed) == ["/a", "/b", "/d"]
    assert [line for line in changed.splitlines() if line not in TEXT.splitlines()] == [
        '  - {"path":"/d","names":["d"],"engine.kind":"mock","prefill_workers":[{"replicas":2}]}'
    ]
    assert changed.index("/d") < changed.index("# about the server")


def test_an_added_entry_is_deleted_again() -> None:
    assert edit_models(edit_models(TEXT, ENTRY, ""), None, "d") == TEXT
    assert edit_models(edit_models("models:\n- {name: a}", ENTRY, ""), None, "d") == (
        "models:\n- {name: a}\n"
    )


def test_only_the_lines_of_an_entry_are_deleted() -> None:
    changed = edit_models(TEXT, None, "a")

    assert paths(changed) == ["/b"]
    assert set(TEXT.splitlines()) - set(changed.splitlines()) == {"  - path: /a", "    name: a"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no block list"),
        ("models: [{path: /a}]", "no block list"),
        ("- models", "no block list"),
        ("models:\n- {path: /a", "not YAML now: .*line 2"),
    ],
)
def test_a_file_without_a_block_list_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        edit_models(text, ENTRY, "")


def test_an_entry_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="begins its names with 'c'"):
        edit_models(TEXT, None, "c")


def adapters(text: str, index: int = 0) -> dict[str, str]:
    settings = resolve_settings(document=(text, "x")).settings
    return dict(parse_lora_modules(list(settings.each_model)[index].engine.lora_modules))


@pytest.mark.parametrize("model", ["a", "b"])
def test_an_adapter_is_added_to_the_entry_of_its_model_and_deleted(model: str) -> None:
    index = "ab".index(model)
    changed = edit_adapters(TEXT, model, {"sql": "/sql"})
    assert [adapters(changed, each) for each in (index, 1 - index)] == [{"sql": "/sql"}, {}]
    two = edit_adapters(changed, model, {"code": "/code"})
    assert adapters(two, index) == {"sql": "/sql", "code": "/code"}
    assert adapters(edit_adapters(two, model, {"sql": ""}), index) == {"code": "/code"}
    assert set(TEXT.splitlines()) - set(two.splitlines()) <= {"  - {path: /b, names: [b, c]}"}


@pytest.mark.parametrize(
    "text",
    [
        "model: {path: /m, adapters: [sql=/sql]}\n",
        "model:\n  path: /m\n  adapters:\n  - sql=/sql  # the first\nserver: {http_port: 1}\n",
        "model:\n  adapters:\n    sql: /sql\n  # its folder\n  path: /m\n",
        'model: {adapters: \'{"name": "sql", "path": "/sql"}\', path: /m}',
    ],
)
def test_every_form_of_adapters_can_be_changed(text: str) -> None:
    assert adapters(text) == {"sql": "/sql"}
    changed = edit_adapters(text, "m", {"code": "/code"})
    assert adapters(changed) == {"sql": "/sql", "code": "/code"}
    assert resolve_settings(document=(changed, "x")).settings.model.path == "/m"
    assert ("# its folder" in changed) == ("# its folder" in text)


def test_a_file_without_a_section_of_the_model_is_refused() -> None:
    for text in ("", "models: [{path: /x}]", "engine: {kind: mock}"):
        with pytest.raises(ValueError, match="no section of its own for 'a'"):
            edit_adapters(text, "a", {"sql": "/sql"})


def test_adapters_without_a_folder_or_of_one_name_are_refused() -> None:
    for text, reason in {
        "[sql]": "names no LoRA adapter",
        "[a=/x, a=/y]": "two LoRA adapters",
    }.items():
        for section in (
            f"model: {{adapters: {text}}}",
            f"models: [{{path: /x, adapters: {text}}}]",
        ):
            with pytest.raises(ConfigError, match=reason):
                resolve_settings(document=(section, "x"))


def names(text: str) -> list[list[str]]:
    settings = resolve_settings(document=(text, "x")).settings
    return [list(model.model.names) for model in settings.each_model]


def test_an_alias_moves_between_entries() -> None:
    text = "# mine\nmodels:\n- path: /x/a\n  names: [a, chat]  # both\n- {path: /x/b}\n"
    moved = edit_alias(text, "chat", "b")
    assert names(moved) == [["a"], ["b", "chat"]]
    assert moved.startswith("# mine\n")
    assert edit_alias(moved, "chat", "b") == moved
    assert names(edit_alias(moved, "chat", "")) == [["a"], ["b"]]
    assert names(edit_alias(moved, "chat", "a")) == [["a", "chat"], ["b"]]
    assert names(edit_alias("models:\n- path: /x/a\n", "c", "a")) == [["a", "c"]]
    for unlisted in (text, "model: {path: /x/c}\n"):
        with pytest.raises(ValueError, match="begins its names with 'c'"):
            edit_alias(unlisted, "chat", "c")
