"""Several models on one port: their processes, changes of them while clients ask, and the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import Deployment, until
from tests.support.fake_lora import write_adapter

SETTINGS = """\
router: {mode: kv}
engine: {kind: mock, speedup_ratio: 1000, lora_updates: true}
models:
- {path: MODEL, names: [qwen, chat], workers: 2}
- {path: MODEL, name: small, engine: {block_size: 32}}
"""


def ask(
    deployment: Deployment, model: str, path: str = "/v1/chat/completions", body: Any = None
) -> tuple[int, Any]:
    """Return the status of an answer, and its body."""
    if path.endswith("completions"):
        body = {"model": model, "messages": [{"role": "user", "content": "a dog"}], "max_tokens": 4}
    request = urllib.request.Request(
        deployment.url + path,
        json.dumps(body).encode() if body else None,
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else text
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def dynamo(deployment: Deployment, *words: object) -> tuple[int, str]:
    """Run a command on the deployment; return its exit code and what it has written."""
    command = [sys.executable, "-m", "dynamo", *map(str, words), "--deployment", deployment.port]
    result = subprocess.run(
        [*map(str, command)],
        env=deployment.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout


def models(deployment: Deployment) -> dict[str, tuple[list[str], str, int]]:
    code, output = dynamo(deployment, "models", "--json")
    assert code == 0, output
    return {
        row["name"]: (row["aliases"], row["state"], row["workers"]) for row in json.loads(output)
    }


@contextmanager
def clients(deployment: Deployment, *names: str) -> Iterator[list[tuple[str, int]]]:
    """Ask for models again and again; collect name and status of each answer."""
    answers, ended = list[tuple[str, int]](), threading.Event()

    def run(name: str) -> None:
        while not ended.is_set():
            answers.append((name, ask(deployment, name)[0]))

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def change_models(deployment: Deployment, model: Path, file: Path) -> None:
    """Add, rename, scale and remove a model while clients ask for the others."""
    with clients(deployment, "qwen", "small", "chat") as answers:
        before = file.read_text()
        added = ("add", model, "out=mock", "--model-name", "third", "--save")
        code, output = dynamo(deployment, *added)
        assert (code, output.splitlines()[-2:]) == (0, ["third is served", f"{file} has the model"])
        assert '"names":["third"]' in file.read_text()
        assert ask(deployment, "third")[0] == 200
        assert dynamo(deployment, "models", "--alias", "chat=third")[0] == 0
        assert models(deployment)["third"] == (["chat"], "loaded", 1)
        assert dynamo(deployment, "models", "--alias", "chat=small")[0] == 0
        assert dynamo(deployment, "scale", "small=2")[0] == 0
        code, output = dynamo(deployment, "remove", "third", "--save")
        assert (code, output.splitlines()[-1]) == (0, f"{file} lacks the model")
        assert file.read_text() == before
    assert {status for _, status in answers} == {200}


def load_on_demand(deployment: Deployment, model: Path) -> None:
    """Add a model on demand, which is loaded by requests at once, leaves, and comes again."""
    added = ("add", model, "out=mock", "--model-name", "rare", "--load", "on_demand")
    code, output = dynamo(deployment, *added, "--keep-alive", "0")
    assert (code, output.splitlines()[-1]) == (0, "rare is loaded when wanted")
    assert models(deployment)["rare"] == ([], "unloaded", 0)
    assert ask(deployment, "", "/v1/models/rare")[1]["status"] == {"value": "unloaded"}
    assert ask(deployment, "rare", "/v1/models/rare")[1]["status"] == {"value": "unloaded"}
    for _ in range(2):  # the second time, the frontend knows the model
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda _: ask(deployment, "rare")[0], range(8))
            assert set(answers) == {200}
        until(lambda: models(deployment)["rare"] == ([], "unloaded", 0))
        until(lambda: ask(deployment, "", "/v1/models/rare")[1]["status"]["value"] == "unloaded")
    body = {"model": "rare", "input": "a dog", "background": True, "max_output_tokens": 4}
    response = ask(deployment, "", "/v1/responses", body)[1]
    path = f"/v1/responses/{response['id']}"
    until(lambda: ask(deployment, "", path)[1]["status"] == "incomplete")
    until(lambda: models(deployment)["rare"] == ([], "unloaded", 0))
    log = deployment.log.read_text()
    assert log.count("a model is loaded model=rare") == 3
    assert dynamo(deployment, "remove", "rare")[0] == 0
    assert ask(deployment, "rare")[0] == 404


def change_adapters(deployment: Deployment, model: Path, tmp_path: Path, file: Path) -> None:
    """Load adapters by request and by command, kill all workers, and find them again."""
    folders = [write_adapter(tmp_path / f"a{n}", str(n).encode()) for n in range(8)]
    for number, folder in enumerate(folders[:6]):
        body = {"lora_name": f"a{number}", "lora_path": folder, "base_model": "small"}
        assert ask(deployment, "", "/v1/load_lora_adapter", body)[0] == 200
    for number, save in ((6, ()), (7, ("--save",))):
        command = ("add", folders[number], "--adapter-of", "small", *save)
        assert dynamo(deployment, *command) == (
            0,
            f"a{number} is served, an adapter of small\n" + f"{file} has the adapter\n" * len(save),
        )
    names = [f"a{number}" for number in range(8)]
    before = [ask(deployment, name)[1]["choices"] for name in ("small", *names)]
    assert len({str(choices) for choices in before}) == 9

    workers = [each for each in deployment.processes() if each["name"].startswith("small-worker")]
    for worker in workers:
        os.kill(worker["pid"], signal.SIGKILL)
    assert [ask(deployment, name)[1]["choices"] for name in ("small", *names)] == before
    old = {worker["pid"] for worker in workers}
    assert old.isdisjoint(each["pid"] for each in deployment.processes())

    for words, error in (
        ((folders[0], "--adapter-of", "small", "--model-name", "qwen"), "'qwen' is a model"),
        ((folders[0], "--adapter-of", "small", "--model-name", "chat"), "'chat' is an alias"),
        ((folders[0], "--adapter-of", "third"), "no model 'third'"),
        ((folders[0], "--adapter-of", "qwen"), "'a0' is an adapter of small"),
        (("/nowhere", "--adapter-of", "small"), "/nowhere is no folder"),
        ((tmp_path, "--adapter-of", "small"), "is no LoRA adapter"),
        ((model, "--model-name", "a0"), "'a0' is an adapter of small"),
    ):
        code, output = dynamo(deployment, "add", *words)
        assert code != 0
        assert error in output
    assert dynamo(deployment, "remove", "a7", "--save")[0] == 0
    assert ask(deployment, "a7")[1]["error"]["code"] == "model_not_found"


def check_refusals(deployment: Deployment, model: Path) -> None:
    """Check that wrong names, paths, engines and flags are refused."""
    for words, error in (
        (("add", model, "--model-name", "qwen"), "'qwen' is a model of this deployment"),
        (("add", "/nowhere", "--model-name", "x"), "there is no file or folder /nowhere"),
        (("add", model, "out=none", "--model-name", "x"), "unknown engine 'none'"),
        (("add", model, "--http-port", "1"), "about the whole deployment"),
        (("models", "--alias", "qwen=small"), "is the name of a model"),
        (("models", "--alias", "x=nothing"), "no model 'nothing'"),
        (("remove", "nothing"), "no model 'nothing'"),
    ):
        code, output = dynamo(deployment, *words)
        assert code != 0
        assert error in output


def test_models_come_and_go_beside_each_other(
    start: Callable[..., Deployment], tiny_model: Path, tmp_path: Path
) -> None:
    """All steps share a deployment, whose start takes longer than they do."""
    file = tmp_path / "models.yaml"
    file.write_text(SETTINGS.replace("MODEL", str(tiny_model)))
    deployment = start("-f", file)
    until(lambda: ask(deployment, "", "/health")[0] == 200 and len(models(deployment)) == 2)

    names = sorted(process["name"] for process in deployment.processes())
    assert names == ["frontend", "qwen-worker-1", "qwen-worker-2", "small-worker", "supervisor"]
    for name in ("qwen", "chat", "small", "default"):
        until(lambda name=name: ask(deployment, name)[0] == 200)
    assert ask(deployment, "default")[1]["model"] == "qwen"
    health = ask(deployment, "", "/health")[1]
    assert health["workers"] == {"qwen": 2, "small": 1}
    assert {name: state["state"] for name, state in health["model_states"].items()} == {
        "qwen": "loaded",
        "small": "loaded",
    }

    change_models(deployment, tiny_model, file)
    status, body = ask(deployment, "third")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "'small'" in body["error"]["message"]
    assert ask(deployment, "smal")[1]["error"]["hint"] == "did you mean 'small'?"
    described = ask(deployment, "", "/v1/models/small")[1]
    assert (described["status"], described["workers"]) == ({"value": "loaded"}, 2)
    with urllib.request.urlopen(deployment.url + "/metrics") as page:
        metrics = page.read().decode()
    assert 'model="third"' not in metrics
    assert 'dynamo_model_state{model="small",state="loaded"} 1' in metrics
    assert 'dynamo_admission_waiting_requests{model="qwen"} 0' in metrics

    load_on_demand(deployment, tiny_model)
    change_adapters(deployment, tiny_model, tmp_path, file)
    check_refusals(deployment, tiny_model)
    assert "the default model is small now" in dynamo(deployment, "remove", "qwen")[1]
    assert ask(deployment, "default")[1]["model"] == "small"
    assert "only model" in dynamo(deployment, "remove", "small")[1]
