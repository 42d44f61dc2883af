"""A real API server for tests, where `KUBEBUILDER_ASSETS` names the folder of its binaries."""

from __future__ import annotations

import os
import ssl
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.support.servers import free_port

ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
TOKEN = "admintoken"
START_S = 60.0


class ControlPlane:
    """etcd, kube-apiserver, and kube-controller-manager where it is there, used with `with`. No
    kubelet runs: a test gives pods their status. `ca` is the PEM of the server's certificate.
    `with_scheduler`: kube-scheduler binds pods to nodes."""

    def __init__(self, folder: Path, *, with_scheduler: bool = False) -> None:
        self._folder = folder
        self._with_scheduler = with_scheduler
        self._etcd_port, self._peer_port, port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{port}"
        self.ca = b""
        self._port = port
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_all(self) -> None:
        folder, etcd_url = self._folder, f"http://127.0.0.1:{self._etcd_port}"
        peer_url = f"http://127.0.0.1:{self._peer_port}"
        key, public = folder / "account.key", folder / "account.pub"
        for command in (["genrsa", "-out", key], ["rsa", "-in", key, "-pubout", "-out", public]):
            subprocess.run(["openssl", *command], check=True, capture_output=True)
        tokens = folder / "tokens.csv"
        tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
        self._start(
            "etcd",
            data_dir=folder / "etcd",
            listen_client_urls=etcd_url,
            advertise_client_urls=etcd_url,
            listen_peer_urls=peer_url,
            initial_advertise_peer_urls=peer_url,
            initial_cluster=f"default={peer_url}",
        )
        self._start(
            "kube-apiserver",
            etcd_servers=etcd_url,
            bind_address="127.0.0.1",
            advertise_address="127.0.0.1",
            secure_port=self._port,
            cert_dir=folder / "certs",
            service_cluster_ip_range="10.254.0.0/24",
            service_account_issuer="https://kubernetes.default",
            service_account_key_file=public,
            service_account_signing_key_file=key,
            token_auth_file=tokens,
            authorization_mode="RBAC",
            disable_admission_plugins="ServiceAccount",
            enable_admission_plugins="OwnerReferencesPermissionEnforcement",
        )
        self._wait_ready()
        config = folder / "kubeconfig"
        config.write_text(_kubeconfig(self.url))
        if (Path(ASSETS) / "kube-controller-manager").exists():
            self._start_controller(
                "kube-controller-manager",
                kubeconfig=config,
                service_account_private_key_file=key,
                node_monitor_grace_period="1h",  # no kubelet renews the Leases of nodes
                horizontal_pod_autoscaler_sync_period="1s",
            )
        if self._with_scheduler:
            self._start_controller("kube-scheduler", kubeconfig=config)

    def _start_controller(self, program: str, **flags: object) -> None:
        self._start(
            program,
            leader_elect="false",
            bind_address="127.0.0.1",
            port=0,
            secure_port=free_port(),
            cert_dir=self._folder / program,
            **flags,
        )

    def _start(self, program: str, **flags: object) -> None:
        command = [
            str(Path(ASSETS) / program),
            *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
        ]
        log = self._stack.enter_context((self._folder / f"{program}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _wait_ready(self) -> None:
        end = time.monotonic() + START_S
        certificate = self._folder / "certs" / "apiserver.crt"
        request = urllib.request.Request(f"{self.url}/readyz")
        request.add_header("authorization", f"Bearer {TOKEN}")
        while True:
            try:
                self.ca = certificate.read_bytes()
                context = ssl.create_default_context(cadata=self.ca.decode())
                urllib.request.urlopen(request, timeout=5, context=context).close()
                return
            except (OSError, ssl.SSLError):
                log = self._folder / "kube-apiserver.log"
                assert time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.1)


def _kubeconfig(url: str) -> str:
    cluster = f'{{name: c, cluster: {{server: "{url}", insecure-skip-tls-verify: true}}}}'
    return (
        f"apiVersion: v1\nkind: Config\nclusters: [{cluster}]\n"
        f"users: [{{name: u, user: {{token: {TOKEN}}}}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
    )
