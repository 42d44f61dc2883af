"""Fixtures that several folders share: a tiny model folder, and whole deployments on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tiny_model(folder: Path) -> Path:
    """A model folder without weights: byte-level BPE of about 600 tokens, template, config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the quick brown fox jumps over a lazy dog while workers serve tokens of many models "
    tokenizer.train_from_iterator([words * 20, Path(__file__).read_text()], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 8192,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    about = {"chat_template": TEMPLATE, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, for the mock and echo engines."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    """That model's, its fast encoder proven: every byte a token."""
    from dynamo.models.tokenization.tokenizer import load_tokenizer_blocking

    return load_tokenizer_blocking(tiny_model / "tokenizer.json", ensure_verified=True)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Any:
    """Its tables."""
    from dynamo.scheduling.processor.vocabulary import Vocabulary

    return Vocabulary(tokenizer)


def free_port() -> int:
    """A port that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float = 30) -> Any:
    """Wait for a condition; its value."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
    return found


class Deployment:
    """`dynamo run ...` (or another command) as a user starts it, with state and log of its own;
    `folder`: where."""

    def __init__(
        self,
        arguments: list[str],
        home: Path,
        environ: dict[str, str],
        command: str = "run",
        folder: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / f"run-{self.port}.log"
        self.environ = os.environ | environ
        words = [sys.executable, "-m", "dynamo", command, *arguments, "--http-port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=self.environ, cwd=folder or home
            )

    def wait_ready(self, timeout_s: float = 45) -> None:
        """Until /health is 200; fails with the log if the process ends."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode}:\n{self.log.read_text()}")
            if self.get("/health")[0] == 200:
                return
            time.sleep(0.05)
        pytest.fail(f"not ready in {timeout_s} s:\n{self.log.read_text()}")

    def get(self, path: str) -> tuple[int, str]:
        """Status (0: nobody answers) and body of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST."""
        ask = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(ask, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def processes(self) -> list[dict[str, Any]]:
        """This deployment's processes, by `dynamo ps --json`."""
        command = [sys.executable, "-m", "dynamo", "ps", "--json"]
        out = subprocess.run(command, capture_output=True, check=True, env=self.environ).stdout
        return [p for p in json.loads(out) if p["deployment"] == f"http-{self.port}"]

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 20) -> int:
        """Signal the supervisor as Ctrl-C does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"did not stop in {timeout_s} s:\n{self.log.read_text()}")


@pytest.fixture(scope="session")
def runtime_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with a state folder of the test session's own."""
    state = tmp_path_factory.mktemp("run")
    state.chmod(0o700)
    return {"XDG_RUNTIME_DIR": str(state)}


Start = Callable[..., Deployment]


@pytest.fixture
def start(tmp_path: Path, runtime_environ: dict[str, str]) -> Iterator[Start]:
    """`start("out=mock", MODEL, ...)` -> a ready Deployment, stopped after the test."""
    running: list[Deployment] = []

    def begin(
        *arguments: object, ready: bool = True, command: str = "run", folder: Path | None = None
    ) -> Deployment:
        words = [str(a) for a in arguments]
        one = Deployment(words, tmp_path, runtime_environ, command, folder)
        running.append(one)
        if ready:
            one.wait_ready()
        return one

    yield begin
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def mock_deployment(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> Iterator[Deployment]:
    """Two fast mock workers, shared by the tests of a module."""
    arguments = ["out=mock", str(tiny_model), "--workers", "2", "--speedup-ratio", "1000"]
    one = Deployment(
        [*arguments, "--model-name", "tiny"], tmp_path_factory.mktemp("mock"), runtime_environ
    )
    one.wait_ready()
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def ready_made_services_stay_unlinked() -> Iterator[None]:
    """A graph links ready-made classes; in a process of many graphs, each must find them bare."""
    yield
    components = sys.modules.get("dynamo.services.components")
    if components is None:
        return
    from dynamo.sdk.decorators import spec_of

    for name in ("Frontend", "Processor", "Router", "Worker"):
        spec_of(getattr(components, name)).links.clear()
