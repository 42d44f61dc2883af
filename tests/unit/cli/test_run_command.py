from __future__ import annotations

import io
import os
import pty
import sys
import termios
from pathlib import Path
from unittest.mock import patch

import pytest

from dynamo.cli import run
from dynamo.cli.progress_bar import CLEAR_LINE, ProgressBar, format_byte_progress
from dynamo.cli.settings_flags import load_settings
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import ModelSettings, ServerSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engines.lora_adapters import parse_lora_modules
from dynamo.inference.native import engine_sizing


def settings_of(line: str, environ: dict[str, str] | None = None) -> Settings:
    args = run.parser().parse(line.split())
    _, extra = run.parse_words(args.words)
    with patch.dict(os.environ, environ or {}, clear=True):
        return load_settings(args, extra).settings


def test_words_and_flags_may_come_in_any_order() -> None:
    settings = settings_of(
        "out=mock --workers 4 --speedup-ratio 1000000 --router-mode power-of-two "
        "--http-host 127.0.0.1 --http-port 20200 --model-name smol MODEL_DIR --model-name s2"
    )

    assert settings.engine.kind == "mock"
    assert settings.engine.workers == 4
    assert settings.engine.speedup_ratio == 1e6
    assert settings.router.mode == "power_of_two"
    assert settings.server.http_port == 20200
    assert settings.model.names == ("smol", "s2")
    assert settings.model.path == "MODEL_DIR"


def test_plain_run_serves_the_default_model_by_http() -> None:
    assert run.parse_words([]) == ("http", {})
    assert settings_of("") == Settings()


def test_every_setting_has_a_dotted_flag() -> None:
    settings = settings_of(
        "--server.stream_backlog_bytes 2Mi --no-log-requests --runtime.drain_s 1m"
    )

    assert settings.server.stream_backlog_bytes == 2 << 20
    assert settings.server.log_requests is False
    assert settings.runtime.drain_s == 60


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-modules", "a=/x", "b=/y=z"],
        ["--lora-modules", "a=/x", "--lora-modules=b=/y=z"],
        ["--lora-modules=a=/x", "b=/y=z"],
        ["--engine.lora_modules", "a=/x,b=/y=z"],
        ["--lora-modules", '["a=/x","b=/y=z"]'],
        ["--lora-modules", '{"name": "a", "path": "/x"}', '{"name": "b", "path": "/y=z"}'],
        ["--lora-modules", '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y=z"}]'],
        ["--lora-modules", "a=/x", '{"name": "b", "path": "/y=z", "base_model_name": "m"}'],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("model", ["./models/v=2", "models"])
def test_several_adapters_follow_one_flag(words: list[str], model: str) -> None:
    for line in (
        [*words, "out=vllm", model],
        ["out=vllm", model, *words],
        ["out=vllm", *words, model],
    ):
        args = run.parser().parse(line)
        _, extra = run.parse_words(args.words)
        with patch.dict(os.environ, {}, clear=True):
            settings = load_settings(args, extra).settings
        modules = list(parse_lora_modules(settings.engine.lora_modules))
        assert modules == [("a", "/x"), ("b", "/y=z")]
        assert (settings.engine.kind, settings.model.path) == ("vllm", model)


def test_adapters_of_a_file_have_every_form(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("engine:\n  lora_modules:\n  - a=/x\n  - {name: b, path: /y}\n")
    modules = settings_of(f"-f {path}").engine.lora_modules
    assert list(parse_lora_modules(modules)) == [("a", "/x"), ("b", "/y")]


def test_a_list_is_repeated_or_has_commas_or_is_json() -> None:
    for line in ("--model-name a --model-name b", "--model-name a,b", '--model-name ["a","b"]'):
        assert settings_of(line).model.names == ("a", "b")
    assert settings_of("--sampling.stop_tokens 1,2").sampling.stop_tokens == ("1", "2")
    with pytest.raises(ConfigError, match="--model-name: wanted a list"):
        settings_of('--model-name ["a"')


def test_a_flag_without_value_does_not_consume_a_word() -> None:
    settings = settings_of("--log-requests MODEL_DIR")

    assert settings.server.log_requests is True
    assert settings.model.path == "MODEL_DIR"


@pytest.mark.parametrize("flag", ["--server.log_requests", "--log-requests"])
@pytest.mark.parametrize(("value", "expected"), [("false", False), ("Off", False), ("1", True)])
def test_a_switch_takes_a_value(flag: str, value: str, expected: bool) -> None:
    for line in (f"MODEL {flag} {value}", f"{flag} {value} MODEL", f"{flag}={value} MODEL"):
        settings = settings_of(line)
        assert settings.server.log_requests is expected
        assert settings.model.path == "MODEL"


def test_a_word_overrides_the_environment() -> None:
    environ = {"DYNAMO_ENGINE__KIND": "echo", "DYNAMO_MODEL__PATH": "elsewhere"}

    assert settings_of("", environ).engine.kind == "echo"
    assert settings_of("out=mock here", environ).engine.kind == "mock"
    assert settings_of("out=mock here", environ).model.path == "here"


def test_the_file_is_named_by_flag_or_environment(tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    first.write_text("server: {http_port: 1}")
    second = tmp_path / "second.yaml"
    second.write_text("server: {http_port: 2}")
    environ = {"DYNAMO_CONFIG_PATH": str(second)}

    assert settings_of(f"-f {first}").server.http_port == 1
    assert settings_of("", environ).server.http_port == 2
    assert settings_of(f"--config {first}", environ).server.http_port == 1


def test_the_announcement_has_an_example_request(capsys: pytest.CaptureFixture[str]) -> None:
    run.announce(["smol", "s2"], Settings(), "http://127.0.0.1:8000")

    err = capsys.readouterr().err
    assert "smol, s2 is served at http://127.0.0.1:8000/v1" in err
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in err
    assert "authorization" not in err

    secured = Settings(server=ServerSettings(api_keys=("secret",)))
    run.announce(["smol"], secured, "http://127.0.0.1:8000")

    err = capsys.readouterr().err
    assert "-H 'authorization: Bearer KEY'" in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("memory_bytes", "better"),
    [(32e9, "dynamo run Qwen/Qwen3-4B"), (5e9, "dynamo run Qwen/Qwen3-0.6B"), (1e9, "")],
)
def test_the_default_model_says_what_it_is_good_for(
    memory_bytes: float, better: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_sizing, "available_memory_bytes", lambda *_: memory_bytes)
    note = run.better_model_note(Settings())
    assert "135M weights" in note
    assert note.count("\n") == 1
    assert better in note
    assert ("Qwen" in note) == bool(better)
    monkeypatch.setenv("PATH", "/nowhere")  # as after `make run`
    note = run.better_model_note(Settings())
    assert (f"{Path(sys.executable).with_name('dynamo')} run Qwen" in note) == bool(better)
    mocked = Settings(engine=EngineSettings(kind="mock"))
    own = Settings(model=ModelSettings(path="./mine"))
    assert [run.better_model_note(settings) for settings in (mocked, own)] == ["", ""]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_redrawn_on_a_terminal_and_removed() -> None:
    out = FakeTerminal()
    with ProgressBar(out) as bar:
        bar("fetching", 50_000_000, 100_000_000)
        bar("fetching", 50_000_001, 100_000_000)
        bar("fetching", 100_000_000, 100_000_000)

    assert out.getvalue().count("\r") == 3
    assert " 50%  50 of 100 MB" in out.getvalue()
    assert out.getvalue().endswith(CLEAR_LINE)


def test_without_a_terminal_the_bar_is_a_few_lines() -> None:
    out = io.StringIO()
    with ProgressBar(out) as bar:
        bar("proving", 0, 0)
        bar("fetching", 0, 2_000_000)
        bar("fetching", 1, 2_000_000)

    assert out.getvalue().splitlines() == [format_byte_progress("fetching", 0, 2_000_000)]


def test_written_lines_appear_above_the_bar() -> None:
    out = FakeTerminal()
    with ProgressBar(out) as bar:
        bar.write("before\n")
        bar("fetching", 50, 100)
        bar.write("meanwhile\n")
    bar.write("after\n")

    half = format_byte_progress("fetching", 50, 100)
    assert out.getvalue() == (
        f"before\n{CLEAR_LINE}{half}{CLEAR_LINE}meanwhile\n{half}{CLEAR_LINE}after\n"
    )


def test_progress_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    out = FakeTerminal()
    with caplog.at_level("INFO"), ProgressBar(out, as_logs=True) as bar:
        bar("fetching", 1, 2)

    assert out.getvalue() == ""
    (record,) = caplog.records
    assert record.fields == {"step": "fetching", "done_bytes": 1, "total_bytes": 2}  # type: ignore[attr-defined]


def test_the_bar_is_cut_to_a_narrow_terminal() -> None:
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (4, 12))
    with os.fdopen(secondary, "w") as out, ProgressBar(out) as bar:
        bar("fetching a model", 5, 10)
        bar.write("a line\n")
    fits = format_byte_progress("fetching a model", 5, 10)[:11]
    expected = f"{CLEAR_LINE}{fits}{CLEAR_LINE}a line\r\n{fits}{CLEAR_LINE}"
    output = ""
    while len(output) < len(expected):
        output += os.read(primary, 1000).decode()
    os.close(primary)
    assert output == expected


def test_only_the_first_of_many_models_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    run.announce([f"m{number}" for number in range(500)], Settings(), "http://host:1")
    assert "\nm0, m1, " in (text := capsys.readouterr().err)
    assert "m11 and 488 more is served" in text
