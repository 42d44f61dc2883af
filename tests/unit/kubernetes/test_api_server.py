"""The API server of the test cluster: verbs, schemas, subresources, watches, owners of fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.kubernetes import APPLY, MERGE, KubernetesClient, definition

from dynamo.testing.kubernetes.server import ApiServer

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GRAPHS = "/apis/lab.example.com/v1/namespaces/default/graphs"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[KubernetesClient]:
    client = KubernetesClient(server.url)
    await client.create(DEFINITIONS, definition())
    yield client
    client.close()


def graph(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "lab.example.com/v1",
        "kind": "Graph",
        "metadata": {"name": name},
        "spec": {"components": [{"name": "a"}], **spec},
    }


async def test_a_schema_fills_prunes_and_refuses(client: KubernetesClient) -> None:
    created = await client.create(GRAPHS, graph("one", unknown=1))
    assert created["spec"] == {"replicas": 1, "components": [{"name": "a", "replicas": 1}]}
    assert created["metadata"]["generation"] == 1
    wrong = graph("two", mode="x", replicas=-1, components=[{"nam": "b"}, {"name": 1}])
    status, body = await client.send("POST", GRAPHS, wrong)
    assert status == 422
    assert {(c["field"], c["reason"]) for c in body["details"]["causes"]} == {
        ("spec.mode", "FieldValueNotSupported"),
        ("spec.replicas", "FieldValueInvalid"),
        ("spec.components[0].name", "FieldValueRequired"),
        ("spec.components[1].name", "FieldValueTypeInvalid"),
    }
    strict = graph("two", modes="agg")
    status, body = await client.send("POST", GRAPHS, strict, fieldValidation="Strict")
    assert (status, body["message"]) == (400, 'strict decoding error: unknown field "spec.modes"')


async def test_writes_conflict_and_count_generations(client: KubernetesClient) -> None:
    first = await client.create(GRAPHS, graph("one"))
    assert (await client.send("POST", GRAPHS, graph("one")))[1]["reason"] == "AlreadyExists"
    first["spec"]["replicas"] = 2
    status, second = await client.send("PUT", f"{GRAPHS}/one", first)
    assert (status, second["metadata"]["generation"]) == (200, 2)
    assert (await client.send("PUT", f"{GRAPHS}/one", first))[1]["reason"] == "Conflict"
    _, same = await client.send("PATCH", f"{GRAPHS}/one", {"spec": {"replicas": 2}}, MERGE)
    assert same["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


async def test_status_and_scale_are_written_apart(client: KubernetesClient) -> None:
    await client.create(GRAPHS, graph("one"))
    patch = {"spec": {"replicas": 9}, "status": {"replicas": 3}}
    _, done = await client.send("PATCH", f"{GRAPHS}/one/status", patch, MERGE)
    assert (done["spec"]["replicas"], done["status"]) == (1, {"replicas": 3})
    assert done["metadata"]["generation"] == 1
    scale = await client.get(f"{GRAPHS}/one/scale")
    assert (scale["spec"], scale["status"]) == ({"replicas": 1}, {"replicas": 3})
    await client.send("PATCH", f"{GRAPHS}/one/scale", {"spec": {"replicas": 4}}, MERGE)
    assert (await client.get(f"{GRAPHS}/one"))["spec"]["replicas"] == 4


async def test_a_watch_continues_from_a_version(
    client: KubernetesClient, server: ApiServer
) -> None:
    version = (await client.get(GRAPHS))["metadata"]["resourceVersion"]
    await client.create(GRAPHS, graph("one"))
    async with client.watch(GRAPHS, resourceVersion=version) as events:
        assert (await events.get())[0] == "ADDED"
        await client.send("DELETE", f"{GRAPHS}/one")
        assert (await events.get())[0] == "DELETED"
    server.compact()
    async with client.watch(GRAPHS, resourceVersion=version) as events:
        kind, failure = await events.get()
        assert (kind, failure["code"]) == ("ERROR", 410)


async def test_an_object_that_leaves_a_selector_is_deleted_for_its_watch(
    client: KubernetesClient,
) -> None:
    labelled = graph("one") | {"metadata": {"name": "one", "labels": {"a": "b"}}}
    version = (await client.create(GRAPHS, labelled))["metadata"]["resourceVersion"]
    async with client.watch(GRAPHS, labelSelector="a=b", resourceVersion=version) as events:
        await client.create(GRAPHS, graph("two"))
        patch = {"metadata": {"labels": {"a": "c"}}}
        await client.send("PATCH", f"{GRAPHS}/one", patch, MERGE)
        kind, item = await events.get()
        assert (kind, item["metadata"]["name"]) == ("DELETED", "one")


async def test_lists_come_in_pages_of_one_moment(
    client: KubernetesClient, server: ApiServer
) -> None:
    for name in ("a", "b", "c"):
        await client.create(GRAPHS, graph(name))
    page = await client.get(GRAPHS, limit="2")
    await client.send("DELETE", f"{GRAPHS}/c")
    rest = await client.get(GRAPHS, limit="2", **{"continue": page["metadata"]["continue"]})
    assert [item["metadata"]["name"] for item in page["items"] + rest["items"]] == ["a", "b", "c"]
    page = await client.get(GRAPHS, limit="1")
    server.compact()
    status, _ = await client.send("GET", GRAPHS, **{"continue": page["metadata"]["continue"]})
    assert status == 410


async def test_owners_of_fields_keep_and_give_them_up(client: KubernetesClient) -> None:
    def applied(**spec: Any) -> dict[str, Any]:
        return {"apiVersion": "lab.example.com/v1", "kind": "Graph", "spec": spec}

    async def apply(manager: str, force: str = "false", **spec: Any) -> tuple[int, Any]:
        query = {"fieldManager": manager, "force": force}
        return await client.send("PATCH", f"{GRAPHS}/one", applied(**spec), APPLY, **query)

    status, _ = await apply("first", mode="agg", components=[{"name": "a", "replicas": 1}])
    assert status == 201
    _, done = await apply("second", components=[{"name": "b", "replicas": 2}])
    assert [item["name"] for item in done["spec"]["components"]] == ["a", "b"]
    status, body = await apply("second", components=[{"name": "a", "replicas": 5}])
    assert (status, body["details"]["causes"][0]["field"]) == (
        409,
        '.spec.components[{"name":"a"}].replicas',
    )
    _, done = await apply("second", "true", components=[{"name": "a", "replicas": 5}])
    assert done["spec"]["components"] == [{"name": "a", "replicas": 5}]
    _, done = await apply("first", components=[{"name": "a"}])
    assert "mode" not in done["spec"]
    _, again = await apply("first", components=[{"name": "a"}])
    assert again == done


async def test_finalizers_hold_an_object(client: KubernetesClient) -> None:
    held = graph("one")
    held["metadata"]["finalizers"] = ["lab.example.com/x"]
    await client.create(GRAPHS, held)
    await client.send("DELETE", f"{GRAPHS}/one")
    assert "deletionTimestamp" in (await client.get(f"{GRAPHS}/one"))["metadata"]
    await client.send("PATCH", f"{GRAPHS}/one", {"metadata": {"finalizers": None}}, MERGE)
    assert (await client.send("GET", f"{GRAPHS}/one"))[0] == 404
