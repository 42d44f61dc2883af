"""Run the HTTP tests in the source distribution of vLLM or llama.cpp against `dynamo run`.

    pip download --no-deps --no-binary :all: vllm     # or xllamacpp, which carries llama.cpp
    python benchmarks/peer_tests.py vllm-VERSION.tar.gz [arguments of pytest]

The tests stay as they are. This file is also the pytest plugin that replaces what starts servers
and loads models; tests without a server are left out. $DYNAMO is the command, $PEER_ENGINE mock or
native, $PEER_MODEL a folder of `dynamo export`. Needs pytest-asyncio, openai, anthropic, requests,
regex, transformers, jsonschema, filelock. The outcomes: docs/how-to/peer-tests.md.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import urllib.request
from pathlib import Path
from unittest.mock import MagicMock

PARTS = {
    "vllm": ["/tests/entrypoints/"],
    "xllamacpp": ["/tools/server/tests/", "/models/templates/"],
}
ROOTS = {"vllm": "*", "xllamacpp": "*/thirdparty/llama.cpp/tools/server/tests"}
DYNAMO, ENGINE = os.environ.get("DYNAMO", "dynamo"), os.environ.get("PEER_ENGINE", "mock")
MODEL = os.environ.get("PEER_MODEL", "")
with socket.create_server(("127.0.0.1", 0)) as listener:
    PORT = listener.getsockname()[1]
STUBS = (*("vllm", "torch", "schemathesis", "hypothesis", "PIL", "fastapi", "starlette", "wget"),
         *("pybase64", "mistral_common", "lm_eval", "tests.utils", "tests.conftest", "tests.models"))  # fmt: skip
"""Modules that only tests without a server use, and the helpers of vLLM's tests."""
CLIENT_MODELS = (
    "test davinci-002 gpt-4.1 gpt-3.5-turbo gpt-3.5-turbo-instruct text-embedding-3-small"
)
OPENAI_ROUTES = re.compile(
    "/(chat/completions|completions|models|embeddings|responses|rerank)(/|$)"
)
FORM_PATTERNS = ("42", "3000", "foooo", "John", "{5,5}")
"""Parts of llama.cpp's patterns of forms. Its other patterns are words of its own model."""
running: dict = {}


def serve(*flags: str) -> str:
    """Return the address of a deployment with these flags. Only the last one runs."""
    if running.get("flags") != flags:
        stop()
        command = [DYNAMO, "run", f"out={ENGINE}", "--http-port", str(PORT), *flags]
        running.update(flags=flags, process=subprocess.Popen(command, stdout=subprocess.DEVNULL))
        while running["process"].poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
    return f"http://127.0.0.1:{PORT}"


def stop() -> None:
    if running:
        running["process"].terminate()
        running["process"].wait()
        running.clear()


class RemoteOpenAIServer:
    """vLLM's class of this name, with those flags of `vllm serve` that exist here."""

    def __init__(self, model: str, arguments: list, env_dict: dict | None = None, **_) -> None:
        values = {
            a.replace("_", "-"): b for a, b in zip(arguments, [*arguments[1:], ""], strict=True)
        }
        flags = ["--model-name", values.get("--served-model-name", model)]
        for ours, flag in (("--max-model-len",) * 2, ("--tool-format", "--tool-call-parser")):
            flags += [ours, values[flag]] if flag in values else []
        if "--no-enable-prefix-caching" in values:
            flags += ["--no-engine.prefix_caching"]
        if key := values.get("--api-key") or (env_dict or {}).get("VLLM_API_KEY"):
            flags += ["--server.api_keys", key]
        most = "400" if ENGINE == "native" else "100"
        self.url_root = serve(MODEL, "--sampling.max_tokens", most, *flags)

    __enter__, __exit__ = lambda self: self, lambda *_: None

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def __getattr__(self, name: str):  # get_client, get_async_client, get_client_anthropic, ...
        library = "Anthropic" if "anthropic" in name else "OpenAI"
        make = getattr(
            importlib.import_module(library.lower()), "Async" * ("async" in name) + library
        )
        base = self.url_for(*(() if library == "Anthropic" else ("v1",)))
        return lambda **options: make(
            **{"base_url": base, "api_key": "token", "max_retries": 0} | options
        )


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, *_):
        known = any(f"{name}.".startswith(f"{stub}.") for stub in STUBS)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = stub_attribute
        return module

    def exec_module(self, module) -> None:
        """Leave the module empty."""


def stub_attribute(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    limits = types.SimpleNamespace(
        min=-(1 << 63), max=(1 << 63) - 1, get_vocab_size=lambda: len(TOKENIZER)
    )
    known = {"RemoteOpenAIServer": RemoteOpenAIServer, "get_tokenizer": lambda *_, **__: TOKENIZER,
             "iinfo": lambda *_: limits, "ModelConfig": lambda **_: limits, "ROCM_EXTRA_ARGS": []}  # fmt: skip
    return known[name] if name in known else MagicMock(name=name, **{"is_rocm.return_value": False})


def start_llama_server(server, **_) -> None:
    """llama.cpp's `ServerProcess.start`."""
    embeds = server.server_embeddings or server.server_reranking
    names = [*(server.model_alias or "tinyllama-2").split(","), *CLIENT_MODELS.split()]
    names = names[:1] if "test_basic" in os.environ["PYTEST_CURRENT_TEST"] else names
    serve(
        *("minilm" if embeds else with_template(server.chat_template_file),),
        *(part for name in names for part in ("--model-name", name)),
        *("--sampling.max_tokens", str(server.n_predict or 64), "--max-num-seqs", str(server.n_slots or 4)),
        *(() if embeds else ("--max-model-len", str((server.n_ctx or 512) // (server.n_slots or 1)))),
        *("--server.cors_origins", "loopback" if server.cors_origins == "localhost" else "*"),
        *(("--server.api_keys", server.api_key) if server.api_key else ()),
    )  # fmt: skip
    server.server_port = PORT


def with_template(path: str | None) -> str:
    """Return the model's folder, or a copy with another chat template."""
    if not path:
        return MODEL
    folder = Path(tempfile.gettempdir(), f"peer-{Path(path).stem}")
    shutil.copytree(MODEL, folder, copy_function=os.symlink) if not folder.exists() else None
    config = json.loads(Path(MODEL, "tokenizer_config.json").read_text()) | {
        "chat_template": Path(path).read_text()
    }
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def pytest_configure() -> None:
    if Path("utils.py").exists():  # llama.cpp
        sys.path.insert(0, str(Path.cwd()))
        utils = importlib.import_module("utils")
        match, process = utils.match_regex, utils.ServerProcess
        utils.match_regex = lambda form, text: (
            match(form, text) or not any(p in form for p in FORM_PATTERNS)
        )
        utils.ServerPreset.load_all = lambda: None
        process.start, process.stop = start_llama_server, lambda _: None
        process.make_url = lambda _, path, *__: (
            f"http://127.0.0.1:{PORT}" + "/v1" * bool(OPENAI_ROUTES.match(path)) + path
        )


def pytest_collection_modifyitems(config, items: list) -> None:
    asking = [item for item in items if re.search("server|client", " ".join(item.fixturenames))]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def pytest_sessionfinish() -> None:
    stop()


def main() -> int:
    archive, *arguments = sys.argv[1:]
    kind = Path(archive).name.partition("-")[0]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as source:
        members = [m for m in source if any(part in m.name for part in PARTS[kind])]
        source.extractall(folder, members, filter="data")
        [root] = Path(folder).glob(ROOTS[kind])
        if kind == "vllm":
            (root / "tests/__init__.py").touch()
            (root / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
        model = MODEL or f"{tempfile.gettempdir()}/peer-model"
        if not Path(model).exists():
            subprocess.run([DYNAMO, "export", model], check=True)
        variables = os.environ | {"PEER_MODEL": model, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-m", "pytest", "-p", "peer_tests", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", *arguments]
        return subprocess.run(command, cwd=root, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
elif MODEL:
    from transformers import AutoTokenizer

    TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
    sys.meta_path.insert(0, StubFinder())
