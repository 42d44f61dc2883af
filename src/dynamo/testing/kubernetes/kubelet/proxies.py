"""Addresses of the test cluster: relays for Services, and for the API server under TLS."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import subprocess
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.testing.kubernetes.controllers.endpoints import SLICES
from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.objects import ClusterObjects
from dynamo.testing.kubernetes.store import Change

Address = tuple[str, int]
_CLAIM_PORT = 47_990
log = logging.getLogger(__name__)


def claim_subnet() -> tuple[str, socket.socket]:
    """Return the two middle numbers of addresses that no other cluster of this host has, and the
    socket that holds them."""
    while True:
        subnet = f"{random.randint(1, 127)}.{random.randint(1, 254)}"
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind((f"127.{subnet}.254", _CLAIM_PORT))
        except OSError:
            claim.close()
        else:
            return subnet, claim


def host_address(address: str) -> str:
    """Return the address of this host that an address 10.x.y.z of the cluster stands for."""
    return f"127.{address.partition('.')[2]}"


class Relay:
    """Passes connections on to the address that `choose` returns, and breaks them if it returns
    None."""

    def __init__(self, choose: Callable[[], Address | None]) -> None:
        self._choose = choose
        self._tasks = BackgroundTasks()
        self._server: asyncio.Server | None = None

    async def start(self, address: Address, tls: ssl.SSLContext | None = None) -> int:
        """Listen and return the port. Raises `OSError`."""
        self._server = await asyncio.start_server(self._accept, *address, ssl=tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Break all connections and refuse others."""
        if self._server is not None:
            self._server.close()
        await self._tasks.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start(self._serve(reader, writer), "relay")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            if target := self._choose():
                back, there = await asyncio.open_connection(*target)
                await run_all(_copy(reader, there), _copy(back, writer))
        except OSError:
            pass
        finally:
            for end in filter(None, (writer, there)):
                end.close()


async def _copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        to.write(data)
        await to.drain()
    if to.can_write_eof():
        to.write_eof()
    else:
        to.close()


def make_certificate(folder: Path) -> ssl.SSLContext:
    """Return the context of a server with a new certificate for 127.0.0.1, which is `ca.crt` in
    the folder. Runs the program `openssl`. Blocks."""
    options = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=dynamo "
        "-addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout ca.key -out ca.crt"
    )
    command = ["openssl", *options.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "ca.key")
    return context


class ServiceProxy(Controller):
    """Listens at the address of each Service, as kube-proxy lets it seem, and passes connections
    on to its ready pods in turn. Changes of slices are followed `lag_s` later."""

    kinds = ("services", SLICES)

    def __init__(self, objects: ClusterObjects) -> None:
        self.lag_s = 0.0
        self._servers: dict[tuple[Any, int], Relay] = {}
        self._targets: dict[tuple[Any, str], list[Address]] = {}
        self._turns = count()
        self._tasks = BackgroundTasks()
        super().__init__(objects)

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        metadata = change.after["metadata"]
        if change.kind == "services":
            return ((metadata["namespace"], metadata["name"]),)
        name = (metadata.get("labels") or {}).get("kubernetes.io/service-name")
        return ((metadata["namespace"], name),) if name else ()

    def reconcile(self, key: Any) -> None:
        service = self.store.get("services", key)
        address = (service or {}).get("spec", {}).get("clusterIP", "None")
        ports = service["spec"]["ports"] if service and address not in ("", "None") else ()
        self._tasks.start(self._follow(key, address, {p["port"]: p for p in ports}))

    async def _follow(self, key: Any, address: str, ports: dict[int, Any]) -> None:
        await asyncio.sleep(self.lag_s)
        for at in [at for at in self._servers if at[0] == key and at[1] not in ports]:
            await self._servers.pop(at).close()
        for number, port in ports.items():
            name = port.get("name", "")
            self._targets[key, name] = self._ready_pods(key, name)
            if (key, number) in self._servers:
                continue
            relay = self._servers[key, number] = Relay(partial(self._choose, key, name))
            try:
                await relay.start((host_address(address), number))
            except OSError as error:
                log.warning("cannot listen for a Service: %s", error)
                del self._servers[key, number]

    def _ready_pods(self, key: Any, name: str) -> list[Address]:
        """Return the addresses of the ready endpoints for a port."""
        return [
            (host_address(endpoint["addresses"][0]), port["port"])
            for item in self.store.items(SLICES, key[0])
            if (item["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == key[1]
            for port in item.get("ports") or ()
            if port["name"] == name
            for endpoint in item["endpoints"]
            if endpoint["conditions"]["ready"]
        ]

    def _choose(self, key: Any, name: str) -> Address | None:
        targets = self._targets.get((key, name))
        return targets[next(self._turns) % len(targets)] if targets else None

    async def close(self) -> None:
        """Listen no more."""
        await self._tasks.close()
        for server in self._servers.values():
            await server.close()
