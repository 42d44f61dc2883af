"""Clients of other projects against deployments. Each program runs once, apart from pytest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "how-to" / "clients.md"
CHAT = ("chat", "stream", "tools", "error")
CASES = {
    "ai_anthropic_client.mjs": (*CHAT, "structured"),
    "ai_compatible_client.mjs": (*CHAT, "structured", "embeddings"),
    "ai_openai_client.mjs": (*CHAT, "structured", "embeddings"),
    "anthropic_client.mjs": (*CHAT, "structured"),
    "anthropic_client.py": (*CHAT, "tool_runner", "structured", "forced_call"),
    "instructor_client.py": ("stream", "structured", "forced_call", "error"),
    "langchain_client.py": (*CHAT, "structured", "forced_call", "embeddings"),
    "litellm_client.py": (*CHAT, "structured", "embeddings"),
    "llama_index_client.py": (*CHAT, "structured", "embeddings"),
    "lm_eval_client.py": ("score", "generate", "error"),
    "openai_agents_client.py": (*CHAT, "conversation", "structured"),
    "openai_client.mjs": (*CHAT, "structured", "embeddings"),
    "openai_client.py": (*CHAT, "structured", "forced_call", "embeddings"),
    "pydantic_ai_client.py": (*CHAT, "structured", "forced_call", "embeddings"),
}
PAIRS = [(program, case) for program, cases in CASES.items() for case in cases]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("program", "case"), PAIRS)
def test_a_client_is_served(
    program: str, case: str, outcomes: Callable[[str], dict[str, str | None]]
) -> None:
    cases = outcomes(program)
    assert set(cases) == set(CASES[program])
    assert cases[case] is None, cases[case]


def test_every_program_is_in_the_table() -> None:
    programs = {path.name for path in FOLDER.glob("*_client.*")}
    assert programs == set(CASES)


def test_the_page_has_the_versions_that_are_tried() -> None:
    page = PAGE.read_text()
    versions = json.loads((FOLDER / "package.json").read_text())["dependencies"]
    tried = [f"{package} {version}" for package, version in versions.items()]
    for program in FOLDER.glob("*_client.py"):
        header = program.read_text().partition("\n# ///\n")[0]
        pins = re.findall(r'"([\w-]+)(?:\[.*?\])?==([\d.]+)"', header)
        tried += [f"{package} {version}" for package, version in pins]
    assert [client for client in tried if client not in page] == []
