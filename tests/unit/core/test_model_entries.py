"""The list `models` of a settings file: how commands change it."""

from __future__ import annotations

import pytest

from dynamo.core.settings.document import edit_models
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
