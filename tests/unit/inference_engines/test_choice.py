"""The choice of an engine: by the model's headers, the machine, and what is installed."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from tests.support.gguf import write_gguf_header

from dynamo.cli.models.engines import format_offers
from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings, WorkersSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engines import choice, packages
from dynamo.inference.engines.choice import choose_engine, engine_offers, with_engine
from dynamo.inference.engines.model_facts import read_model_facts
from dynamo.inference.engines.packages import EngineStatus, engine_install_command
from dynamo.services.deployment.model_groups import with_engines

DATA = Path(__file__).parents[2] / "data" / "models"
CONFIGS = json.loads((DATA / "configs.json").read_text())
HEADERS = json.loads((DATA / "gguf_headers.json").read_text())
NATIVE_MODELS = [name for name, model in CONFIGS.items() if model["engine"] == "native"]
TENSORS = {"token_embd.weight": ("Q8_0", (64, 32)), "output_norm.weight": ("F32", (32,))}


class Machine:
    """A machine: its memory, whether it has a card, and the engines that are installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory_bytes = 64_000_000_000
        self.driver = Path("/nowhere/driver")
        self.installed = {"llamacpp"}
        self._patch = monkeypatch
        self.apply()

    def apply(self) -> None:
        self._patch.setattr(choice, "available_memory_bytes", lambda *_: self.memory_bytes)
        self._patch.setattr(packages, "NVIDIA_DRIVER", self.driver)
        self._patch.setattr(choice, "engine_status", self._status)

    def _status(self, kind: str) -> EngineStatus:
        if kind in self.installed:
            return EngineStatus(kind, "1.0")
        command = engine_install_command(kind)
        return EngineStatus(kind, "", "not installed", command, is_installed=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def settings_of(path: Path | str, **engine: object) -> Settings:
    return Settings(model=ModelSettings(path=str(path)), engine=EngineSettings(**engine))


def folder_of(root: Path, config: dict[str, object]) -> Path:
    folder = root / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def file_of(root: Path, name: str) -> Path:
    path = root / f"{name}.gguf"
    write_gguf_header(path, HEADERS[name]["values"], HEADERS[name]["tensors"])
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_folder_leads_to_an_engine_or_to_its_command(
    name: str, tmp_path: Path, machine: Machine
) -> None:
    expected = CONFIGS[name]["engine"]
    settings = settings_of(folder_of(tmp_path, CONFIGS[name]["config"]))
    offers = engine_offers(settings, read_model_facts(settings.model.path))
    usable = [offer for offer in offers if not offer.problem]
    if expected == "native":
        assert usable[0].kind == "native"
        assert usable[0].command == f"dynamo run out=native {settings.model.path}"
        return
    assert not usable
    with pytest.raises(ModelUnavailable) as caught:
        choose_engine(settings)
    if expected == "vllm":
        assert caught.value.hint == engine_install_command("vllm")
        machine.installed.add("vllm")
        with pytest.raises(ModelUnavailable, match="no weights") as caught:
            choose_engine(settings)
        assert "vllm would serve them" in caught.value.hint
    elif expected == "gpu":
        assert f"pip install '{packages.ENGINE_PACKAGES['vllm'].requirement}'" in caught.value.hint
    else:
        assert "dynamo run out=openai URL" in caught.value.hint


@pytest.mark.parametrize("name", HEADERS)
def test_a_published_gguf_file_leads_to_an_engine_or_to_its_command(
    name: str, tmp_path: Path, machine: Machine
) -> None:
    expected = HEADERS[name]["engine"]
    settings = settings_of(file_of(tmp_path, name))
    if expected != "none":
        assert choose_engine(settings).kind == expected
        machine.installed.clear()
    if expected != "native":
        with pytest.raises(ModelUnavailable) as caught:
            choose_engine(settings)
        wanted = engine_install_command("llamacpp") if expected == "llamacpp" else "out=openai URL"
        assert wanted in caught.value.hint


def test_the_data_are_thirty_folders_and_twenty_files() -> None:
    assert (len(CONFIGS), len(HEADERS)) == (30, 20)


def test_packed_weights_are_served_where_float32_does_not_fit(
    tmp_path: Path, machine: Machine
) -> None:
    settings = settings_of(file_of(tmp_path, "Qwen3-8B-Q4_K_M"))
    assert choose_engine(settings).kind == "native"
    machine.memory_bytes = 16_000_000_000
    chosen = choose_engine(settings)
    assert chosen.kind == "llamacpp"
    assert "the engine has 16000 MB of memory and needs 3" in chosen.reason
    machine.installed.clear()
    with pytest.raises(ModelUnavailable, match=r"needs 3.* MB") as caught:
        choose_engine(settings)
    assert caught.value.hint == engine_install_command("llamacpp")
    machine.memory_bytes = 1_000_000_000
    with pytest.raises(ConfigError, match=r"needs 3.* MB") as caught:
        choose_engine(settings)
    assert "smaller model" in caught.value.hint
    blocks = settings_of(settings.model.path, num_blocks=10)
    assert choose_engine(blocks).kind == "native"


def test_a_card_serves_folders_and_not_files(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.driver = tmp_path
    machine.installed.add("vllm")
    machine.apply()
    folder = folder_of(tmp_path, CONFIGS["openai/gpt-oss-20b"]["config"])
    offers = engine_offers(settings_of(folder), read_model_facts(str(folder)))
    assert next(offer.kind for offer in offers if not offer.problem) == "vllm"
    sglang = next(offer for offer in offers if offer.kind == "sglang")
    assert (sglang.would_serve, sglang.command) == (True, engine_install_command("sglang"))
    assert choose_engine(settings_of(file_of(tmp_path, "Qwen3-0.6B-Q8_0"))).kind == "native"


def test_settings_that_an_engine_lacks_lead_to_another(tmp_path: Path, machine: Machine) -> None:
    path = file_of(tmp_path, "gpt-oss-20b-MXFP4")
    with pytest.raises(ModelUnavailable, match=r"gpt-oss.*llamacpp.*prefill"):
        choose_engine(settings_of(path, role="prefill"))
    assert choose_engine(settings_of(path)).kind == "llamacpp"


def test_a_file_in_several_parts_is_left_to_llama_cpp(tmp_path: Path, machine: Machine) -> None:
    header = HEADERS["Llama-3.2-1B-Instruct-Q8_0"]
    for part in (1, 2):
        path = tmp_path / f"llama-{part:05}-of-00002.gguf"
        write_gguf_header(path, header["values"] | {"split.count": 2}, header["tensors"])
    facts = read_model_facts(str(tmp_path / "llama-00001-of-00002.gguf"))
    assert facts.stored_bytes == 2 * path.stat().st_size
    assert choose_engine(settings_of(facts.spec)).kind == "llamacpp"


def test_a_header_without_its_weights_is_judged_and_not_started(
    tmp_path: Path, machine: Machine
) -> None:
    path = file_of(tmp_path, "Qwen3-30B-A3B-Q4_K_M")
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    offers = engine_offers(settings_of(path), read_model_facts(str(path)))
    assert [offer.kind for offer in offers if not offer.problem] == ["llamacpp"]
    with pytest.raises(ModelUnavailable, match="ends before its weights"):
        choose_engine(settings_of(path))


def test_the_choice_is_made_once_and_named_engines_stay(tmp_path: Path, machine: Machine) -> None:
    path = file_of(tmp_path, "Qwen3-8B-Q4_K_M")
    machine.memory_bytes = 16_000_000_000
    assert with_engine(settings_of(path)).engine.kind == "llamacpp"
    machine.memory_bytes = 64_000_000_000
    assert with_engine(settings_of(path)).engine.kind == "llamacpp"
    named = settings_of(path, kind="mock")
    assert with_engine(named) is named
    assert with_engine(settings_of("/no/such", urls=("http://h:1",))).engine.kind == "openai"


def test_the_workers_of_a_deployment_have_the_engine_of_their_model(
    tmp_path: Path, machine: Machine
) -> None:
    moe = str(file_of(tmp_path, "Qwen3-30B-A3B-Q4_K_M"))
    small = str(file_of(tmp_path, "Qwen3-0.6B-Q8_0"))
    frontends = settings_of("/no/such", workers=0)
    assert with_engines(frontends) is frontends or with_engines(frontends) == frontends
    groups = WorkersSettings(decode=WorkerGroupSettings(replicas=1, model=moe))
    alone = Settings(engine=EngineSettings(workers=0), workers=groups)
    with pytest.raises(ModelUnavailable):  # llama.cpp has no decode workers
        with_engines(alone)
    native = WorkersSettings(decode=WorkerGroupSettings(replicas=1, model=small))
    settings = Settings(engine=EngineSettings(workers=0), workers=native)
    assert with_engines(settings).engine.kind == "native"
    both = Settings(model=ModelSettings(path=moe), workers=native)
    with pytest.raises(ConfigError, match="need different engines"):
        with_engines(both)


def test_models_of_this_project_need_no_header() -> None:
    assert choose_engine(Settings()).kind == "native"
    assert choose_engine(settings_of("minilm")).kind == "native"


def test_the_table_has_a_line_and_a_command_for_each_engine(
    tmp_path: Path, machine: Machine
) -> None:
    settings = settings_of(file_of(tmp_path, "Qwen3-30B-A3B-Q4_K_M"))
    lines = format_offers(engine_offers(settings, read_model_facts(settings.model.path)))
    text = "\n".join(lines)
    assert "native    no" in text
    assert "'qwen3moe'" in text
    assert f"  -> dynamo run out=llamacpp {settings.model.path}" in lines
    assert any(line.startswith("mock") and "if named" in line for line in lines)


def test_install_commands_name_this_interpreter_and_known_packages() -> None:
    for kind, package in packages.ENGINE_PACKAGES.items():
        words = shlex.split(engine_install_command(kind))
        assert words[0] == sys.executable or "uv" in words[0]
        assert package.requirement in words or set(package.cpu_requirements) <= set(words)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"GGUF", "damaged"), (b"what", "not a GGUF file"), (b"", "cannot be read")],
)
def test_a_damaged_file_is_reported_before_anything_starts(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnavailable, match=message):
        choose_engine(settings_of(path))
