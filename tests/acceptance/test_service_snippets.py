"""Code about services, runtimes and graphs from the specification's documents."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime import DistributedRuntime
from dynamo.sdk.decorators import spec_of
from dynamo.testing import local

LLM = Path(__file__).parents[2] / "examples" / "llm"

COMPONENT = """
from dynamo.sdk import dynamo_endpoint, service

# 定义组件
@service(dynamo={"namespace": "production"})
class VllmWorker:
    @dynamo_endpoint()
    async def generate(self, request):
        ...
"""

RUNTIME = """
# Python 中使用 Dynamo
from dynamo.runtime import DistributedRuntime
async def main ():
    runtime = await DistributedRuntime . create ()
    namespace = runtime . namespace ( "myapp" )
    component = namespace . component ( "worker" )
    return runtime, component
"""

ARGS = """
VllmWorker:
  ServiceArgs:
    workers: 4  # 4 个服务实例
    resources:
      gpu: 1    # 每个实例 1 个 GPU
"""


async def test_the_component() -> None:
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(COMPONENT, names)
    worker = names["VllmWorker"]

    assert spec_of(worker).namespace == "production"
    async with local(worker) as graph:
        assert await graph[worker].generate({"prompt": "hi"}) is None


async def test_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    names: dict[str, Any] = {}
    exec(RUNTIME, names)
    runtime, component = await names["main"]()

    assert isinstance(runtime, DistributedRuntime)
    assert component.endpoint("generate").path == "myapp.worker.generate"
    assert runtime.namespace("production").name == "production"
    assert runtime.endpoint("dynamo.Processor.chat/completions").name == "chat/completions"
    await runtime.shutdown()


def test_service_args(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(COMPONENT)
    (tmp_path / "workers.yaml").write_text(ARGS)
    words = ["serve", "snippet:VllmWorker", "-f", "workers.yaml", "--dry-run"]
    shown = run(words, tmp_path)

    assert shown.stdout.splitlines()[1].split() == [
        *("VllmWorker", "4", "VllmWorker", "gpu=1", "production.VllmWorker.generate")
    ]
    (tmp_path / "bare.yaml").write_text(ARGS.replace("VllmWorker:\n  ", "").replace("\n  ", "\n"))
    bare = run(["serve", "snippet:VllmWorker", "-f", "bare.yaml"], tmp_path)
    assert bare.returncode == 2
    assert "write it below a service's name: `VllmWorker:`" in bare.stderr


@pytest.mark.parametrize("root", ["Frontend", "AggregatedWorker"])
def test_the_aggregated_graph_serves_http(start: Any, tiny_model: Path, root: str) -> None:
    serve = start(
        *(f"graphs.agg:{root}", "-f", "configs/agg.yaml", "--model-path", tiny_model),
        *("--engine.kind", "mock", "--speedup-ratio", "1000"),
        command="serve",
        folder=LLM,
    )
    end = time.monotonic() + 30
    while not serve.get("/v1/models")[1].startswith("{"):
        assert time.monotonic() < end
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": False, "max_tokens": 300}
    status, answer = serve.post("/v1/chat/completions", {"model": tiny_model.name, **body})

    assert status == 200
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("root", ["Frontend", "Router", "PrefillWorker", "DecodeWorker"])
def test_disaggregated_graphs_start_the_groups_of_the_file(root: str) -> None:
    config = LLM.parents[1] / "configs" / "disagg.yaml"
    completed = run(["serve", f"graphs.disagg:{root}", "-f", str(config), "--dry-run"], LLM)

    assert completed.returncode == 0, completed.stderr
    rows = [line.split()[:2] for line in completed.stdout.splitlines()]
    roles = ("prefill",) if root == "PrefillWorker" else ("decode", "prefill")
    names = [f"{role}-worker-{number}" for role in roles for number in (1, 2)]
    assert all([name, "1"] in rows for name in names)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo", *words]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DYNAMO_")}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environ
    )
