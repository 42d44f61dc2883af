#!/usr/bin/env python3
"""Check the rules of size and naming. Prints every breach and exits with 1 if there is one.

    scripts/check_shape.py [ROOT]

- A file has at most 400 lines, a function at most 50. A file of `LONG_FILES` has at most 600.
- A folder of the source with more than 12 modules is one noun: docs/glossary.md has it in its table
  of folders.
- No file or folder is named utils, common, helpers or manager.
- Only core/tasks.py starts asyncio tasks.
- src never calls id(): objects that find each other share an explicit key.
- src imports only libraries that pyproject.toml declares. The conformance tests and the Kubernetes
  cluster of tests may also import those of the test extra.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
LONG_FILE_LINES = 600
LONG_FILES = {
    "src/dynamo/application/responses/store.py": "states of a stored response, with the tables, "
    "lock and queries that change them",
    "src/dynamo/operations/replay/fast/worker.py": "states of a simulated worker's requests, all "
    "of which change the same sums",
}
"""Files that are one state machine, which would be cut by length alone, with the reason."""
FUNCTION_LINES = 50
FOLDER_FILES = 12
GLOSSARY = Path("docs/glossary.md")
NO_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
FOREIGN_FOLDERS = (Path("src/dynamo/common"),)
"""Import paths of NVIDIA Dynamo."""
FOLDERS = ("src", "tests", "scripts", "benchmarks", "examples")
TASKS = Path("src/dynamo/core/tasks.py")
TASK_STARTERS = {"create_task", "ensure_future", "gather"}
TENSOR_LIBRARIES = {"torch"}
"""Their `gather` starts no task."""
ENGINES = {"vllm"}
"""Engines that users install as they need them: there is a build for each kind of device."""
IMPORTED_AS = {
    "common-expression-language": "cel",
    "pyyaml": "yaml",
    "grpcio": "grpc",
    "nats-py": "nats",
    "opentelemetry-proto": "opentelemetry",
    "pyzmq": "zmq",
}
OWN = {"dynamo", "dynamo_client", "dynamo_conformance"}
UNSHIPPED = {"test", "check", "oracle"}
TESTING = (Path("src/dynamo_conformance"), Path("src/dynamo/testing/kubernetes"))


def main(root: Path) -> int:
    """Print the breaches under `root`. Returns 1 if there are any."""
    project = root / "pyproject.toml"
    shipped, testing = libraries(project, UNSHIPPED), libraries(project, UNSHIPPED - {"test"})
    lines = [*crowded_folders(root), *needless_exceptions(root)]
    for path in python_files(root):
        lines += breaches(root, path, testing if is_for_tests(root, path) else shipped)
    for line in lines:
        print(line)
    return 1 if lines else 0


def python_files(root: Path) -> list[Path]:
    """Return the source files in the known folders."""
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def is_for_tests(root: Path, path: Path) -> bool:
    """Return whether a file may import libraries of the test extra."""
    return any(root / folder in path.parents for folder in TESTING)


def crowded_folders(root: Path) -> Iterator[str]:
    """Yield the large folders of the source that have no row in the glossary's table."""
    glossary = root / GLOSSARY
    nouns = set(
        re.findall(r"(?m)^\| `([^`]+)` \|", glossary.read_text() if glossary.exists() else "")
    )
    for package in sorted((root / "src").rglob("__init__.py")):
        folder = package.parent
        count = len(list(folder.glob("*.py")))
        if count > FOLDER_FILES and str(folder.relative_to(root / "src" / "dynamo")) not in nouns:
            where = folder.relative_to(root)
            yield f"{where}: {count} modules, and {GLOSSARY} has no noun for them"


def needless_exceptions(root: Path) -> Iterator[str]:
    """Yield the entries of `LONG_FILES` that are short enough without it."""
    for name in LONG_FILES:
        path = root / name
        if path.exists() and path.read_text().count("\n") <= FILE_LINES:
            yield f"{name}: at most {FILE_LINES} lines, so that LONG_FILES need not name it"


def libraries(project: Path, without: set[str]) -> set[str]:
    """Return the import names of declared libraries, with all extras but those of `without`."""
    metadata = tomllib.loads(project.read_text())["project"]
    declared = [*metadata["dependencies"]]
    for extra, names in metadata.get("optional-dependencies", {}).items():
        if extra not in without:
            declared += names
    bare = {re.split(r"[<>=\[;! ]", name, maxsplit=1)[0].lower() for name in declared}
    return ENGINES | {IMPORTED_AS.get(name, name.replace("-", "_")) for name in bare}


def breaches(root: Path, path: Path, allowed: set[str]) -> Iterator[str]:
    """Yield a line for each breach in a file."""
    where = path.relative_to(root)
    text = path.read_text()
    lines = text.count("\n")
    most = LONG_FILE_LINES if where.as_posix() in LONG_FILES else FILE_LINES
    if lines > most:
        yield f"{where}: {lines} lines, at most {most}"
    for part in (*where.parts[:-1], where.stem):
        if part in NO_NAMES and not set(FOREIGN_FOLDERS) & set(where.parents):
            yield f"{where}: nothing is called {part!r}; name it after what it does"
    nodes = list(ast.walk(ast.parse(text, str(where))))
    yield from long_functions(where, nodes)
    if where.parts[0] == "src":
        yield from loose_tasks(where, nodes)
        yield from identity_keys(where, nodes)
        yield from foreign_imports(where, nodes, allowed)


def long_functions(where: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Yield functions above the limit."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{where}:{node.lineno}: {node.name} has {lines} lines, at most 50"


def loose_tasks(where: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Yield asyncio tasks that are started outside of core/tasks.py."""
    if where == TASKS:
        return
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in TASK_STARTERS:
            if ast.unparse(node.value) in TENSOR_LIBRARIES:
                continue
            yield f"{where}:{node.lineno}: {node.attr} belongs to core/tasks.py"


def identity_keys(where: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Yield calls of the builtin id(), whose result another object may have later."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id":
            yield f"{where}:{node.lineno}: id() is no key; give the objects an explicit one"


def foreign_imports(where: Path, nodes: list[ast.AST], allowed: set[str]) -> Iterator[str]:
    """Yield imports of libraries that the project does not declare."""
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in allowed | OWN and top not in sys.stdlib_module_names:
                yield f"{where}:{node.lineno}: {top} is no declared dependency"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
