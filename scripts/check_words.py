#!/usr/bin/env python3
"""Check the rules of wording. Prints every breach and exits with 1 if there is one.

    scripts/check_words.py [PATH ...]

Rules for Python files:

- No sentence of a docstring or comment begins with a pronoun that has no noun (`PRONOUNS`).
- No sentence of a docstring or comment has more than 30 words.
- No variable, parameter, attribute or function has one of the names in `VAGUE_NAMES`.
- A class name is defined once in `src/`. `REPEATED_CLASSES` lists the exceptions with reasons.
- A field of a log line that says why is named `reason`.

Rule for Markdown pages: no sentence of running text has more than 30 words. Code blocks, tables and
headings are not checked. Rule for all: no line has one of `LEFT_WORDS`. PATH limits the check to
these files and folders.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SENTENCE_WORDS = 30
PRONOUNS = frozenset({"it", "one", "who", "whoever", "whose", "what", "that", "they", "those"})
VAGUE_NAMES = frozenset({"one", "found", "made", "told", "kept", "given", "said", "asked"})
REPEATED_CLASSES = {
    "DynamoError": "the server's base error and the client library's; users import both names"
}
LEFT_WORDS = {
    r"\bane[w]\b": "again",
    r"\bspare[d]\b": "left out",
    r"[\"']wh[y][\"']: (?!Command|describe_decision)": "reason",
}
"""Patterns of words that are not used, each with the word for it. No pattern matches itself."""
FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs")
SKIPPED_PAGES = ("docs/reference",)
"""Written by scripts/reference.py from texts that are checked where they stand."""

TOKEN = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"'''
    r"""|'''(?:[^\\]|\\.)*?'''|'(?:[^'\\\n]|\\.)*'|#[^\n]*""",
    re.DOTALL,
)
"""A string or a comment. Python's own tokenizer took a third of the time of a check."""

Breach = tuple[int, str]


def main(root: Path, only: list[Path]) -> int:
    """Print the breaches under `root`, limited to `only` where that is not empty."""
    breaches = 0
    classes: dict[str, list[str]] = defaultdict(list)
    shown = set(checked_files(root, only))
    for path in sorted(shown | set((root / "src").rglob("*.py"))):
        text, where = path.read_text(), path.relative_to(root)
        if path.suffix == ".py":
            nodes = list(ast.walk(ast.parse(text)))
            if where.parts[0] == "src":
                for node in nodes:
                    if isinstance(node, ast.ClassDef):
                        classes[node.name].append(f"{where}:{node.lineno}")
            in_file = python_breaches(text, nodes)
        else:
            in_file = page_breaches(text)
        for line, message in (*in_file, *left_words(text)) if path in shown else ():
            breaches += 1
            print(f"{where}:{line}: {message}")
    for message in repeated_classes(classes):
        breaches += 1
        print(message)
    return 1 if breaches else 0


def checked_files(root: Path, only: list[Path]) -> list[Path]:
    """Source files and pages, sorted."""
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    for page in PAGES:
        path = root / page
        files += path.rglob("*.md") if path.is_dir() else [path]
    skipped = [root / page for page in SKIPPED_PAGES]
    files = [path for path in files if not any(page in path.parents for page in skipped)]
    if only:
        files = [path for path in files if any(path == top or top in path.parents for top in only)]
    return sorted(files)


def python_breaches(text: str, nodes: list[ast.AST]) -> Iterator[Breach]:
    """Breaches in one Python file with these nodes as (line, message)."""
    for line, paragraph in [*docstrings(nodes), *comments(text)]:
        yield from sentence_breaches(line, paragraph)
    for node in nodes:
        name = vague_name(node)
        if name is not None:
            yield node.lineno, f"the name {name!r} does not say what it holds"  # type: ignore[attr-defined]


def left_words(text: str) -> Iterator[Breach]:
    """Lines with one of `LEFT_WORDS`."""
    for pattern, instead in LEFT_WORDS.items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"{match[0]!r} is not used here, but {instead!r}"


def vague_name(node: ast.AST) -> str | None:
    """The vague name that `node` binds; None where it binds none."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = node.attr
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        name = node.name
    else:
        return None
    return name if name in VAGUE_NAMES else None


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and, by convention, constants below them."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list) or isinstance(node, ast.IfExp):
            continue
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments, those of neighbouring lines joined."""
    start, last, words = 0, -1, ""
    line, counted = 1, 0
    for match in TOKEN.finditer(text):
        token, place = match[0], match.start()
        if not token.startswith("#") or token.startswith(("#!", "# noqa", "# type:")):
            continue
        line, counted = line + text.count("\n", counted, place), place
        comment = re.sub(r"#\s*noqa: [A-Z0-9, ]+(- )?", "", token).lstrip("# ")
        if line == last + 1 and not text[text.rfind("\n", 0, place) + 1 : place].strip():
            words += "\n" + comment
        else:
            if words:
                yield start, words
            start, words = line, comment
        last = line
    if words:
        yield start, words


def sentence_breaches(line: int, text: str) -> Iterator[Breach]:
    """Breaches of the rules for sentences in the paragraphs of one text."""
    for sentence in sentences(text):
        words = sentence.split()
        start = " ".join(words[:6])
        if words[0].strip(".,:;`'\"").lower() in PRONOUNS:
            yield line, f"a sentence begins with a pronoun: {start!r}"
        if len(words) > SENTENCE_WORDS:
            yield line, f"{len(words)} words in a sentence, at most {SENTENCE_WORDS}: {start!r}"


def sentences(text: str) -> Iterator[str]:
    """Sentences of a text. An item of a list and a line of a table end where the line ends."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*|>] |\d+\. )|::\n", text):
        if paragraph.lstrip().startswith("|") or re.match(r" {4,}", paragraph.lstrip("\n")):
            continue
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        for sentence in re.split(r"(?<=[.!?])[\s)]+(?=[^a-z\s])", plain):
            if sentence.strip():
                yield " ".join(sentence.split())


def page_breaches(text: str) -> Iterator[Breach]:
    """Sentences of a Markdown page that are too long, as (line, message)."""
    line = 1
    for block in re.split(r"(```.*?```\n?)", text, flags=re.DOTALL):
        if not block.startswith("```"):
            offset = line
            for paragraph in re.split(r"(\n\s*\n)", block):
                if not paragraph.lstrip().startswith("#"):
                    for sentence in sentences(paragraph):
                        words = sentence.split()
                        if len(words) > SENTENCE_WORDS:
                            start = " ".join(words[:6])
                            yield offset, f"{len(words)} words in a sentence: {start!r}"
                offset += paragraph.count("\n")
        line += block.count("\n")


def repeated_classes(classes: dict[str, list[str]]) -> Iterator[str]:
    """Class names that are defined more than once; `classes` has the places of each name."""
    for name, lines in sorted(classes.items()):
        if len(lines) > 1 and name not in REPEATED_CLASSES:
            yield f"class {name} is defined {len(lines)} times: {', '.join(lines)}"


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], [Path(name).resolve() for name in sys.argv[1:]]))
