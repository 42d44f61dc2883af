"""Deployments of hosts that share nothing but a discovery plane: models come from a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.conftest import Deployment, until
from tests.support.fake_hub import running_hub
from tests.support.servers import EtcdProcess

Host = Callable[..., Deployment]
BYTES_FROM_HUB = 'dynamo_model_fetch_bytes_total{source="hub"}'
CHAT = {
    "model": "default",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "hello"}],
}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdProcess]:
    with EtcdProcess() as server:
        yield server


@pytest.fixture
def host(tmp_path: Path, etcd: EtcdProcess) -> Iterator[Host]:
    """`host(name, command, *arguments, **environ)` starts a command on a host with a home and a
    cache of its own."""
    running: list[Deployment] = []

    def start(name: str, *arguments: object, command: str = "run", **environ: str) -> Deployment:
        home = tmp_path / name
        for folder in ("home", "cache", "run"):
            (home / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        environ = {
            "HOME": str(home / "home"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_RUNTIME_DIR": str(home / "run"),
            "DYNAMO_ETCD_ENDPOINTS": f"http://127.0.0.1:{etcd.port}",
            "DYNAMO_RUNTIME__NAMESPACE": tmp_path.name,
            **environ,
        }
        texts = [str(argument) for argument in arguments]
        running.append(Deployment(texts, home, environ, command))
        return running[-1]

    yield start
    for deployment in reversed(running):
        deployment.stop()


def test_a_worker_without_a_hub_serves_what_a_peer_has(
    host: Host, tiny_model: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}
    with running_hub({"org/tiny": files}) as hub:
        first = host("first", "out=mock", "org/tiny", HF_ENDPOINT=hub.url)
        until(lambda: first.get("/health")[0] == 200, 60)
    (supervisor,) = [each for each in first.processes() if each["role"] == "supervisor"]
    with urlopen(f"{supervisor['status_url']}/metrics", timeout=10) as page:
        (line,) = [each for each in page.read().decode().splitlines() if BYTES_FROM_HUB in each]
    assert float(line.rpartition(" ")[2]) > len(files["tokenizer.json"])
    nowhere = "http://127.0.0.1:1"
    second = host("second", "out=mock", "org/tiny", HF_ENDPOINT=nowhere)
    until(lambda: "worker serves" in second.log.read_text(), 60)
    until(lambda: second.get("/health")[0] == 200, 60)
    status, answer = second.post("/v1/chat/completions", CHAT)
    assert (status, answer["model"]) == (200, "org/tiny")
    copies = sorted(tmp_path.glob("*/cache/dynamo/shelf/org%2Ftiny/*/tokenizer.json"))
    assert [path.relative_to(tmp_path).parts[0] for path in copies] == ["first", "second"]
