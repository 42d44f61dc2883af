"""A cluster whose pods are processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Self

import msgspec

from dynamo.testing.kubernetes.access import ADMINISTRATOR
from dynamo.testing.kubernetes.cluster import Cluster
from dynamo.testing.kubernetes.kubelet.container import Terms
from dynamo.testing.kubernetes.kubelet.pods import Kubelet
from dynamo.testing.kubernetes.kubelet.proxies import (
    Relay,
    ServiceProxy,
    claim_subnet,
    make_certificate,
)
from dynamo.testing.kubernetes.server import BOOKMARK_S

_INHERITED = ("XDG_CACHE_HOME", "PYTHONPATH", "COVERAGE_PROCESS_START")


class PodCluster(Cluster):
    """A cluster whose pods are processes, and whose Services listen.

    It needs the `openssl` program. All requests need a token, since who may make pods runs
    programs: `token` is the administrator's, and the file `kubeconfig` has it. Images that begin
    with one of `images` exist. Processes of pods have the variables `env` before their own.
    """

    def __init__(
        self,
        nodes: Mapping[str, Mapping[str, str]] | None = None,
        *,
        images: tuple[str, ...] = ("dynamo",),
        env: Mapping[str, str] | None = None,
        probe_s: float = 1.0,
        backoff_s: float = 10.0,
        bookmark_s: float = BOOKMARK_S,
        port: int = 0,
    ) -> None:
        super().__init__(nodes, bookmark_s=bookmark_s)
        self._tls_port = port
        path = f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', os.defpath)}"
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        base = {"PATH": path, "LANG": "C.UTF-8", **inherited, **(env or {})}
        self._terms = Terms(images, base, probe_s, backoff_s)
        self.token = secrets.token_hex(16)

    async def __aenter__(self) -> Self:
        self.folder = Path(mkdtemp(prefix="kube-"))
        try:
            return await self._enter()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    async def _enter(self) -> Self:
        tls = await asyncio.to_thread(make_certificate, self.folder)
        subnet, self._claim = claim_subnet()
        self.server.access.tokens = {self.token: ADMINISTRATOR}
        self.server.access.anonymous = None
        self.kubelet = Kubelet(
            self.objects, self.folder / "pods", subnet, self._terms, self._account_files
        )
        self.server.read_log = self.kubelet.read_log
        self.proxy = ServiceProxy(self.objects)
        self._front = Relay(lambda: ("127.0.0.1", self.server.port))
        self._tls_port = await self._front.start(("127.0.0.1", self._tls_port), tls)
        variables = {"KUBERNETES_SERVICE_HOST": "127.0.0.1",
                     "KUBERNETES_SERVICE_PORT": str(self._tls_port)}  # fmt: skip
        self.kubelet.terms = self._terms._replace(env={**self._terms.env, **variables})
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_bytes(msgspec.json.encode(self._kubeconfig()))
        await super().__aenter__()
        for controller in (self.kubelet, self.proxy):
            self.run(controller)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()  # no controller starts pods again
        await self.kubelet.close()
        await self.proxy.close()
        await self._front.close()
        await super().__aexit__()
        self._claim.close()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """The URL of the API server under TLS."""
        return f"https://127.0.0.1:{self._tls_port}"

    @property
    def kubeconfig(self) -> Path:
        """The configuration of kubectl."""
        return self.folder / "kubeconfig"

    def _kubeconfig(self) -> dict[str, object]:
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "ca.crt")}
        context = {"cluster": "test", "user": "admin", "namespace": "default"}
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": context}],
        }  # fmt: skip

    def _account_files(self, namespace: str, account: str) -> Mapping[str, str]:
        """Return the files that a pod of a service account has."""
        token = self.server.access.account_token(namespace, account)
        return {
            "token": token, "namespace": namespace, "ca.crt": (self.folder / "ca.crt").read_text()
        }  # fmt: skip
