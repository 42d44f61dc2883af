"""Wording: scripts/check_words.py finds what is wrong. `make check` runs it on the project."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(root: Path) -> tuple[int, str]:
    """Exit code and output of the checker that stands in `root`."""
    command = [sys.executable, str(root / "scripts" / "check_words.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_every_breach_is_reported(tmp_path: Path) -> None:
    package = tmp_path / "src" / "dynamo"
    for folder in (package, tmp_path / "scripts", tmp_path / "docs"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "check_words.py", tmp_path / "scripts")
    unused = "ane" + "w"
    sentence = "Words " + "and words " * 15 + "end."
    (package / "first.py").write_text(
        '"""It holds things."""\n'
        "class Queue: ...\n"
        "# What waits stands here.\n"
        "for one in (1, 2):\n"
        "    Queue.kept = one\n"
        f"# {sentence}\n"
        f"# Begins {unused}.\n"
        f"log = {{{chr(34)}why{chr(34)}: 1}}\n"
        "texts = '# It is', \"# It's\", '\\\\', r'\\'# It', \"\"\"# What\n# It\"\"\"\n"
        "ended = '\\\\'  # It is over.\n"
    )
    (package / "second.py").write_text(
        f"def told(said):\n    '''{sentence}'''\n\n\nclass Queue: ...\n"
    )
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n{sentence}\n\n```\nIt is.\n```\n")
    (tmp_path / "README.md").write_text("Short.\n")
    (tmp_path / "CONTRIBUTING.md").write_text("Short.\n")

    code, out = check(tmp_path)

    assert code == 1
    assert "src/dynamo/first.py:1: a sentence begins with a pronoun: 'It holds things.'" in out
    assert "src/dynamo/first.py:3: a sentence begins with a pronoun: 'What waits" in out
    assert "src/dynamo/first.py:4: the name 'one'" in out
    assert "src/dynamo/first.py:5: the name 'kept'" in out
    assert "src/dynamo/first.py:6: 32 words in a sentence" in out
    assert "src/dynamo/second.py:1: the name 'told'" in out
    assert "src/dynamo/second.py:1: the name 'said'" in out
    assert "src/dynamo/second.py:2: 32 words in a sentence" in out
    assert "docs/page.md:3: 32 words in a sentence" in out
    assert "class Queue is defined 2 times" in out
    assert f"src/dynamo/first.py:7: '{unused}' is not used here, but 'again'" in out
    assert "src/dynamo/first.py:8: '\"why\": ' is not used here, but 'reason'" in out
    assert "src/dynamo/first.py:11: a sentence begins with a pronoun: 'It is over.'" in out
    assert len(out.splitlines()) == 13
