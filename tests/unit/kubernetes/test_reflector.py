"""Objects that are followed through outages, forgotten histories and older backups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from tests.support.kubernetes import MERGE, KubernetesClient, account_environment

from dynamo.communication.kubernetes import reflector
from dynamo.communication.kubernetes.link import KubernetesLink, open_link
from dynamo.communication.kubernetes.reflector import Metadata, ObjectChange, Reflector
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks
from dynamo.testing.kubernetes.server import ApiServer

MAPS = "/api/v1/namespaces/default/configmaps"


def as_mapping(_: Metadata, data: bytes) -> Any:
    return msgspec.json.decode(data)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer(bookmark_s=0.2) as server:
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[KubernetesClient]:
    client = KubernetesClient(server.url)
    yield client
    client.close()


@pytest.fixture
async def link(server: ApiServer, tmp_path: Path) -> AsyncIterator[KubernetesLink]:
    link = open_link(30.0, account_environment(server.url, "admintoken", tmp_path / "account"))
    yield link
    await link.close()


class Follower:
    """A reflector of ConfigMaps that runs, and the changes that it told."""

    def __init__(self, link: KubernetesLink, **options: Any) -> None:
        decode = options.pop("decode", as_mapping)
        self.reflector = Reflector(link, MAPS, decode, self._on_changes, **options)
        self.changes: list[tuple[str, bool, bool]] = []
        """Name, whether the object is there, and whether an outage came before."""

    def _on_changes(self, changes: Sequence[ObjectChange[Any]], after_outage: bool) -> None:
        self.changes += [
            (change.key.rpartition("/")[2], change.value is not None, after_outage)
            for change in changes
        ]

    @property
    def data(self) -> dict[str, Any]:
        """The data of the objects by name."""
        objects = self.reflector.objects.values()
        return {item["metadata"]["name"]: item.get("data") for item in objects}

    async def __aenter__(self) -> Self:
        self._tasks = BackgroundTasks()
        self._tasks.start(self.reflector.run())
        await self.reflector.listed.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def put(client: KubernetesClient, name: str, **data: str) -> None:
    body = {"metadata": {"name": name}, "data": data}
    status, answer = await client.send("PATCH", f"{MAPS}/{name}", body, MERGE)
    if status == 404:
        await client.create(MAPS, body)
    else:
        assert status == 200, answer


def lists_and_watches(server: ApiServer) -> tuple[int, int]:
    """Return how many lists and watches the server was asked for."""
    targets = [line for line in server.requests if f"GET {MAPS}?" in line]
    watches = sum("watch=true" in target for target in targets)
    return len(targets) - watches, watches


async def test_objects_are_read_in_pages_and_then_watched(
    server: ApiServer,
    client: KubernetesClient,
    link: KubernetesLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "PAGE_OBJECTS", 3)
    for number in range(8):
        await put(client, f"m{number}", at="1")
    async with Follower(link) as follower:
        assert follower.data == {f"m{number}": {"at": "1"} for number in range(8)}
        assert lists_and_watches(server)[0] == 3
        await put(client, "m3", at="2")
        await client.send("DELETE", f"{MAPS}/m4")
        await until(lambda: "m4" not in follower.data)
        assert follower.data["m3"] == {"at": "2"}
        assert follower.changes[-2:] == [("m3", True, False), ("m4", False, False)]
        assert lists_and_watches(server) == (3, 1)


async def test_a_watch_that_is_cut_goes_on_where_it_was(
    server: ApiServer, client: KubernetesClient, link: KubernetesLink
) -> None:
    await put(client, "a", at="1")
    async with Follower(link) as follower:
        for number in range(2, 5):
            server.cut_watches()
            await put(client, "a", at=str(number))
            await until(lambda: follower.data["a"] == {"at": str(number)})  # noqa: B023
        listed = [line for line in server.requests if f"GET {MAPS}?limit=500" in line]
        assert len(listed) == 1, "a watch that is resumed needs no list"
        assert [outage for _, _, outage in follower.changes] == [True, False, False, False]


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_forgotten_history_is_made_up_by_a_list(
    server: ApiServer, client: KubernetesClient, link: KubernetesLink, how: str
) -> None:
    await put(client, "a", at="1")
    await put(client, "b", at="1")
    async with Follower(link) as follower:
        server.faults.hanging.clear()
        server.cut_watches()
        server.store.remove("configmaps", ("default", "b"))
        server.compact()
        server.faults.code_of_watches = 410 if how == "status" else 0
        server.faults.hanging.set()
        await until(lambda: "b" not in follower.data)
        server.faults.code_of_watches = 0
        await put(client, "a", at="2")
        await until(lambda: follower.data == {"a": {"at": "2"}})
        assert ("b", False, True) in follower.changes
        assert follower.reflector.connection_error == ""


async def test_a_server_that_is_away_is_named_and_awaited(
    server: ApiServer, client: KubernetesClient, link: KubernetesLink
) -> None:
    await put(client, "a", at="1")
    async with Follower(link) as follower:
        await server.stop()
        await until(lambda: "Kubernetes at" in follower.reflector.connection_error)
        with pytest.raises(PlaneUnavailable, match="Kubernetes at"):
            await follower.reflector.refresh()
        assert follower.data == {"a": {"at": "1"}}
        await server.start()
        await put(client, "a", at="2")
        await until(lambda: follower.data == {"a": {"at": "2"}})
        assert follower.reflector.connection_error == ""


async def test_an_older_backup_is_noticed(
    server: ApiServer, client: KubernetesClient, link: KubernetesLink
) -> None:
    await put(client, "a", at="1")
    backup = server.store.backup()
    async with Follower(link) as follower:
        await put(client, "a", at="2")
        await put(client, "b", at="2")
        await until(lambda: "b" in follower.data)
        await server.restore(backup)
        await until(lambda: follower.data == {"a": {"at": "1"}})
        await put(client, "c", at="3")
        await until(lambda: "c" in follower.data)
        assert ("b", False, True) in follower.changes


@pytest.mark.parametrize("code", [429, 500])
async def test_a_server_that_refuses_is_asked_again(
    server: ApiServer, client: KubernetesClient, link: KubernetesLink, code: int
) -> None:
    async with Follower(link) as follower:
        server.faults.code = code
        server.cut_watches()
        await until(lambda: f"answered {code}" in follower.reflector.connection_error)
        server.faults.code = 0
        await put(client, "a", at="1")
        await until(lambda: follower.data == {"a": {"at": "1"}})


async def test_a_read_is_as_of_now_and_its_changes_come_once(
    client: KubernetesClient, link: KubernetesLink
) -> None:
    async with Follower(link) as follower:
        for number in range(50):
            await put(client, "a", at=str(number))
            await follower.reflector.refresh()
            assert follower.data == {"a": {"at": str(number)}}
        await client.send("DELETE", f"{MAPS}/a")
        await follower.reflector.refresh()
        assert follower.data == {}
        await put(client, "b", at="0")
        await until(lambda: "b" in follower.data)
        names = [name for name, present, _ in follower.changes if present]
        assert names == ["a"] * 50 + ["b"]


async def test_an_object_that_turns_invalid_keeps_its_value(
    client: KubernetesClient, link: KubernetesLink
) -> None:
    def decode(metadata: Metadata, data: bytes) -> Any:
        value = as_mapping(metadata, data)
        if value["data"]["at"] == "wrong":
            raise msgspec.DecodeError("wrong")
        return value

    await put(client, "a", at="1")
    async with Follower(link, decode=decode) as follower:
        await put(client, "a", at="wrong")
        await put(client, "b", at="1")
        await until(lambda: "b" in follower.data)
        assert follower.data["a"] == {"at": "1"}


async def test_a_selector_makes_objects_come_and_go(
    client: KubernetesClient, link: KubernetesLink
) -> None:
    async with Follower(link, selector="app=x") as follower:
        for labels in ({"app": "x"}, {"app": "y"}):
            body = {"metadata": {"name": "a", "labels": labels}}
            if labels["app"] == "x":
                await client.create(MAPS, body)
                await until(lambda: "a" in follower.data)
            else:
                await client.send("PATCH", f"{MAPS}/a", body, MERGE)
                await until(lambda: "a" not in follower.data)


async def test_a_token_that_is_refused_is_read_again(
    server: ApiServer, client: KubernetesClient, link: KubernetesLink, tmp_path: Path
) -> None:
    async with Follower(link) as follower:
        server.access.tokens["second"] = server.access.tokens.pop("admintoken")
        (tmp_path / "account" / "token").write_text("second", encoding="ascii")
        await follower.reflector.refresh()
        server.cut_watches()
        await put(client, "a", at="1")
        await until(lambda: "a" in follower.data)
        assert follower.reflector.connection_error == ""
