"""CEL rules of the test cluster's kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.kubernetes import MERGE, KubernetesClient, definition

from dynamo.testing.kubernetes.server import ApiServer

pytest.importorskip("cel")

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GRAPHS = "/apis/lab.example.com/v1/namespaces/default/graphs"
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"type": "string"}},
    "x-kubernetes-validations": [{"rule": "self.kind == oldSelf.kind", "message": "is immutable"}],
}
SPEC = {
    "type": "object",
    "properties": {
        "least": {"type": "integer"},
        "most": {"type": "integer"},
        "restart": {"type": "string"},
        "items": {
            "type": "array",
            "items": ITEM,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "x-kubernetes-validations": [
                {
                    "rule": "self.all(a, self.exists_one(b, "
                    "a.name.lowerAscii() == b.name.lowerAscii()))",
                    "message": "names must be unique",
                }
            ],
        },
    },
    "x-kubernetes-validations": [
        {
            "rule": "!has(self.least) || self.least <= self.most",
            "messageExpression": "'least is ' + string(self.least)",
            "fieldPath": ".least",
        },
        {
            "rule": "oldSelf.hasValue() || !has(self.restart)",
            "message": "not in a new one",
            "optionalOldSelf": True,
        },
    ],
}


@pytest.fixture
async def client() -> AsyncIterator[KubernetesClient]:
    async with ApiServer() as server:
        client = KubernetesClient(server.url)
        yield client
        client.close()


def causes(body: Any) -> list[tuple[str, str]]:
    return [(cause["field"], cause["message"]) for cause in body["details"]["causes"]]


async def test_rules_hold_new_objects_and_changes(client: KubernetesClient) -> None:
    await client.create(DEFINITIONS, definition(spec=SPEC))

    def graph(**spec: Any) -> dict[str, Any]:
        return {"metadata": {"name": "one"}, "spec": spec}

    _, body = await client.send("POST", GRAPHS, graph(least=3, most=2))
    assert causes(body) == [("spec.least", 'Invalid value: "object": least is 3')]
    _, body = await client.send("POST", GRAPHS, graph(restart="now"))
    assert causes(body) == [("spec", 'Invalid value: "object": not in a new one')]
    twins = [{"name": "a", "kind": "x"}, {"name": "A", "kind": "x"}]
    _, body = await client.send("POST", GRAPHS, graph(items=twins))
    assert causes(body) == [("spec.items", 'Invalid value: "array": names must be unique')]
    await client.create(GRAPHS, graph(items=twins[:1]))
    change = {"spec": {"restart": "now", "items": [{"name": "a", "kind": "y"}]}}
    status, body = await client.send("PATCH", f"{GRAPHS}/one", change, MERGE)
    assert status == 422
    assert causes(body) == [("spec.items[0]", 'Invalid value: "object": is immutable')]


@pytest.mark.parametrize("rule", ["self.leest > 1", "self.least >", "self.items.size() < 3 &&"])
async def test_a_wrong_rule_is_refused_with_its_definition(
    client: KubernetesClient, rule: str
) -> None:
    wrong = definition(spec=SPEC | {"x-kubernetes-validations": [{"rule": rule}]})
    status, body = await client.send("POST", DEFINITIONS, wrong)
    assert status == 422
    assert "compilation failed" in body["message"]
