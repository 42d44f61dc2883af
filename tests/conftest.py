"""Fixtures that several folders share: a tiny model folder, and whole deployments on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.file_scheduling import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from tests.support.servers import free_port

os.environ.setdefault("DYNAMO_OBSERVER__ENABLED", "false")
"""Whole deployments have no observer, which takes a second of CPU, unless a test names it."""

for suite in ("discovery", "requests", "shared_payloads", "events", "transfer", "engines"):
    pytest.register_assert_rewrite(f"dynamo_conformance.{suite}")

with suppress(ImportError):  # .venv-engines does not have it
    from hypothesis import settings

    settings.register_profile("any load", deadline=None)
    settings.load_profile("any load")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tiny_model(folder: Path) -> Path:
    """Write a model folder without weights: a byte-level BPE of 600 tokens, template and config."""
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
    tokenizer_config = {
        "chat_template": TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, for the mock and echo engines."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    """The tokenizer of `tiny_model` with a verified fast encoder. Every byte is a token."""
    from dynamo.models.tokenization.tokenizer import load_tokenizer

    return load_tokenizer(tiny_model / "tokenizer.json", ensure_verified=True)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Any:
    """The vocabulary tables of `tokenizer`."""
    from dynamo.scheduling.processor.vocabulary import Vocabulary

    return Vocabulary(tokenizer)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """An S3 server for all tests. Each test has its own prefix in its bucket."""
    from tests.support.servers import S3Process

    with S3Process() as server:
        yield server


def until(condition: Callable[[], Any], timeout_s: float = 30) -> Any:
    """Wait until `condition()` is true and return its value."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
    return value


class Deployment:
    """A process of `dynamo run ...` or another command, with its own state folder and log.

    `folder` is its working directory, by default `home`.
    """

    def __init__(
        self,
        arguments: list[str],
        home: Path,
        environ: dict[str, str],
        command: str = "run",
        folder: Path | None = None,
        program: Sequence[str] = ("-m", "dynamo"),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / f"run-{self.port}.log"
        self.environ = os.environ | environ
        line = [sys.executable, *program, command, *arguments, "--http-port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                line, stdout=log, stderr=subprocess.STDOUT, env=self.environ, cwd=folder or home
            )

    def wait_ready(self, timeout_s: float = 45) -> None:
        """Wait until /health answers 200. Fails with the log if the process ends."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode}:\n{self.log.read_text()}")
            if self.get("/health")[0] == 200:
                return
            time.sleep(0.05)
        pytest.fail(f"not ready in {timeout_s} s:\n{self.log.read_text()}")

    def get(self, path: str) -> tuple[int, str]:
        """Return status (0: no answer) and body of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and JSON body of a POST."""
        status, text = self.post_text(path, body)
        return status, json.loads(text)

    def post_text(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return status and body of a POST."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def processes(self) -> list[dict[str, Any]]:
        """Return this deployment's processes from `dynamo ps --json`."""
        command = [sys.executable, "-m", "dynamo", "ps", "--json"]
        output = subprocess.run(command, capture_output=True, check=True, env=self.environ).stdout
        return [p for p in json.loads(output) if p["deployment"] == f"http-{self.port}"]

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 20) -> int:
        """Send a signal to the supervisor and return its exit code."""
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
    """Environment variables with a state folder for this test session."""
    state = tmp_path_factory.mktemp("run")
    state.chmod(0o700)
    return {"XDG_RUNTIME_DIR": str(state)}


Start = Callable[..., Deployment]


@pytest.fixture
def start(tmp_path: Path, runtime_environ: dict[str, str]) -> Iterator[Start]:
    """`start("out=mock", MODEL, ...)` returns a ready `Deployment`, stopped after the test."""
    deployments: list[Deployment] = []

    def start_deployment(
        *arguments: object, ready: bool = True, command: str = "run", **options: Any
    ) -> Deployment:
        texts = [str(argument) for argument in arguments]
        deployment = Deployment(texts, tmp_path, runtime_environ, command, **options)
        deployments.append(deployment)
        if ready:
            deployment.wait_ready()
        return deployment

    yield start_deployment
    for deployment in deployments:
        deployment.stop()


@pytest.fixture(scope="module")
def mock_deployment(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, runtime_environ: dict[str, str]
) -> Iterator[Deployment]:
    """A deployment with two fast mock workers, shared by the tests of a module."""
    arguments = ["out=mock", str(tiny_model), "--workers", "2", "--speedup-ratio", "1000"]
    deployment = Deployment(
        [*arguments, "--model-name", "tiny"], tmp_path_factory.mktemp("mock"), runtime_environ
    )
    deployment.wait_ready()
    yield deployment
    deployment.stop()


@pytest.fixture(autouse=True)
def unlink_builtin_services() -> Iterator[None]:
    """Remove the links that a graph added to the built-in service classes of this process."""
    yield
    components = sys.modules.get("dynamo.services.components")
    if components is None:
        return
    from dynamo.sdk.decorators import spec_of

    for name in ("Frontend", "Processor", "Router", "Worker", "EmbeddingWorker"):
        spec_of(getattr(components, name)).links.clear()
