"""The CustomResourceDefinitions that are made from the types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dynamo.operations.operator.crds import custom_resources, object_schema
from dynamo.operations.operator.kinds import KINDS
from dynamo.operations.operator.manifests import read_manifests, write_manifests

EXAMPLES = sorted((Path(__file__).parents[2] / "data" / "kubernetes").glob("*.yaml"))


def parts(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and the schemas within it."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from parts(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from parts(schema[key], f"{path}.{key}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.short)
def test_schemas_are_structural(kind: Any) -> None:
    for path, schema in parts(object_schema(kind), kind.kind):
        assert schema.get("type") or schema.get("x-kubernetes-preserve-unknown-fields"), path
        assert not {"$ref", "anyOf", "oneOf", "title", "const"} & schema.keys(), path
        assert schema.get("required", ["x"]), path
        assert not ("properties" in schema and "additionalProperties" in schema), path
        if schema.get("x-kubernetes-list-type") == "map":
            keys = schema["x-kubernetes-list-map-keys"]
            assert set(keys) <= set(schema["items"]["required"]), path


def test_names_versions_and_subresources() -> None:
    rows = {}
    for resource in custom_resources():
        spec = resource["spec"]
        versions = {row["name"]: row["storage"] for row in spec["versions"]}
        sub = set(spec["versions"][0].get("subresources", {}))
        rows[spec["names"]["shortNames"][0]] = (resource["metadata"]["name"], versions, sub)
        schemas = [row["schema"] for row in spec["versions"]]
        assert schemas == [schemas[0]] * len(schemas)
        assert spec["conversion"] == {"strategy": "None"}
    graph, both = "dynamographdeployments.nvidia.com", {"v1beta1": True, "v1alpha1": False}
    adapter = "dynamographdeploymentscalingadapters.nvidia.com"
    assert rows == {
        "dgd": (graph, both, {"status"}),
        "dgdsa": (adapter, both, {"status", "scale"}),
        "dwm": ("dynamoworkermetadatas.nvidia.com", {"v1alpha1": True}, set()),
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_manifests_of_the_peer_keep_all_their_fields(path: Path) -> None:
    (graph,) = read_manifests(path.read_text(), path.name)
    schema = object_schema(KINDS[0])
    jsonschema.validate(graph, schema)

    def check(value: Any, part: dict[str, Any], where: str) -> None:
        if isinstance(value, list):
            for item in value:
                check(item, part["items"], where)
        elif isinstance(value, dict) and not part.get("x-kubernetes-preserve-unknown-fields"):
            extra = part.get("additionalProperties")
            for name, item in value.items():
                inner = part.get("properties", {}).get(name, extra)
                assert inner is not None, f"{where}.{name}"
                check(item, inner, f"{where}.{name}")

    check(graph["spec"], schema["properties"]["spec"], "spec")


def test_manifests_are_written_and_read_again() -> None:
    text = write_manifests(custom_resources())
    assert read_manifests(text, "crds") == list(custom_resources())
    assert "&id" not in text
