"""Manifests as YAML texts: several objects a file, and lists of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dynamo.core.errors import ConfigError


def read_manifests(text: str, name: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML or JSON text; `name` stands for it in messages. Raises
    `ConfigError`."""
    import yaml

    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{name}{at}: not valid YAML: {problem}") from None
    return [item for document in documents for item in _objects(document, name)]


def _objects(document: Any, name: str) -> Iterator[dict[str, Any]]:
    if not isinstance(document, dict) or "kind" not in document or "apiVersion" not in document:
        raise ConfigError(
            f"{name}: a document is no object of Kubernetes",
            hint="each one has apiVersion, kind and metadata",
        )
    if document["kind"] == "List" or "items" in document:
        for item in document.get("items") or ():
            yield from _objects(item, name)
        return
    if not isinstance(document.get("metadata"), dict):
        raise ConfigError(f"{name}: {document['kind']} has no metadata")
    yield document


def write_manifests(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return objects as documents of a YAML text."""
    import yaml

    class PlainDumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes each value out, without references to an equal one."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    texts: list[str] = [
        yaml.dump(item, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=100)
        for item in objects
    ]
    return "---\n".join(texts)
