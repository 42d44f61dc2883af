from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo import __version__
from dynamo.cli import commands, main
from dynamo.cli.commands import COMMANDS, command_parser
from dynamo.core.errors import ModelUnavailable

HEAVY = (
    "asyncio", "numpy", "tokenizers", "fastokens", "jinja2", "uvloop", "huggingface_hub", "yaml",
    "httptools", "ssl", "email",
)  # fmt: skip


def test_the_overview_lists_every_command_but_hidden_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    assert main(["--help"]) == 0

    out = capsys.readouterr().out
    assert all((f"  {name} " in out) is not command.hidden for name, command in COMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dynamo {__version__}\n"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["rn"], "unknown command 'rn'", "'run'"),
        (["status"], "unknown command 'status'", "`dynamo ps`"),
        (["start"], "unknown command 'start'", "`dynamo run`"),
        (["down"], "unknown command 'down'", "`dynamo stop`"),
        (["run", "--model", "m"], "unknown argument '--model'", "`dynamo run MODEL`"),
        (["serve", "a:B", "--model=m"], "unknown argument '--model=m'", "model.path"),
        (["run", "--api-key", "k"], "unknown argument '--api-key'", "server.api_keys"),
        (["ps", "--jsn"], "unknown argument '--jsn'", "--json"),
        (["run", "--http-prot", "1"], "unknown argument '--http-prot'", "--http-port"),
        (["run", "--http-port"], "expected one argument", "dynamo run --help"),
        (["run", "--drain", "--log-requests"], "expected one argument", "dynamo run --help"),
        (["run", "--drain", "-1s"], "runtime.drain_s = '-1s' (flag --drain)", ""),
        (["run", "--kv-host-size", "-1GB"], "cache.cpu_size = '-1GB' (flag --kv-host-size)", ""),
        (["run", "--planner.ttft", "-inf"], "planner.ttft = '-inf'", "first token"),
        (["bench", "--duration", "-.5m"], "--duration -.5m: wanted a duration", ""),
        (["run", "--workers", "many"], "engine.workers = 'many' (flag --workers)", ""),
        (["run", "out=vllm"], "vLLM is not installed", "pip install"),
        (["run", "out=mook"], "unknown engine 'mook'", "mock"),
        (["run", "in=endpoint"], "in=endpoint is not supported yet", "in=http, in=text"),
        (["run", "in=batch:x.jsonl"], "cannot read x.jsonl", ""),
        (["run", "in=htp"], "unknown input", "in=http"),
        (["run", "minilm", "minilm"], "are both called", "names:"),
        (["run", ""], "empty word for the model", "variable"),
        (["config"], "required: explain|check|schema", "dynamo config --help"),
        (["config", "explain", "engine.workers"], "is a setting", "grep engine.workers"),
        (["run", "--config", "/nowhere.yaml"], "/nowhere.yaml: No such file", "--config"),
        (["run", "--log-level", "loud"], "unknown log level", "debug"),
        (["chat", "--url", "http://x"], "unknown argument '--url'", "`dynamo chat URL`"),
        (["bench", "--url=http://x"], "unknown argument '--url=", "`dynamo bench URL`"),
        (["bench", "http://127.0.0.1:99999"], "not a URL", "such as"),
        (["bench", "http://[::1"], "not a URL", "such as"),
        (["explain", "--url", "http://127.0.0.1:99999"], "is not a URL", "such as"),
        (["chat", "Say hello"], "'Say hello' is not like http", "echo TEXT | dynamo chat"),
        (["bench", "--rate", "-1"], "--rate -1", "above 0"),
        (["bench", "--rate=0"], "--rate 0", "above 0"),
        (["bench", "--rate", "5..x"], "--rate 5..x", "5..50"),
        (["bench", "--rate", "5..0", "--duration", "1s"], "--rate 5..0", "above 0"),
        (["bench", "--rate", "nan"], "--rate nan", "above 0"),
        (["bench", "--speed", "nan"], "--speed must be above 0", ""),
        (["bench", "--duration", "0"], "would never end", "--requests"),
        (["stop", "--timeout", "x"], "invalid float", "dynamo stop --help"),
        (["replay", "x", "--loads", "a"], "--loads: invalid value: 'a'", "dynamo replay --help"),
    ],
)
def test_usage_errors_exit_with_2_and_a_hint(
    words: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert error in err.splitlines()[0]
    assert hint in err.partition("hint:")[2]


def test_a_failure_exits_with_1_and_an_interrupt_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: object) -> int:
        raise ModelUnavailable("no such model", hint="try another")

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("dynamo.cli.entry.command_run", lambda name: failing)
    assert main(["run"]) == 1
    assert capsys.readouterr().err == "error: no such model\nhint: try another\n"

    monkeypatch.setattr("dynamo.cli.entry.command_run", lambda name: interrupted)
    assert main(["run"]) == 130


def test_an_os_error_is_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/model")

    monkeypatch.setattr("dynamo.cli.entry.command_run", lambda name: forbidden)
    assert main(["run"]) == 1
    assert capsys.readouterr().err == "error: /model: Permission denied\n"


def test_help_of_a_command_in_either_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "ps"])
    assert capsys.readouterr().out.startswith("usage: dynamo ps")
    for words in (["help", "--help"], ["help", "help"], ["--help", "ps"]):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("usage: dynamo COMMAND")


def test_descriptions_fit_a_line() -> None:
    lines = [
        line for name in COMMANDS for line in str(command_parser(name).description).splitlines()
    ]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_function(name: str) -> None:
    program = (
        f"python -m dynamo.{name[1:]}"
        if "entry_points" in COMMANDS[name].target
        else f"dynamo {name}"
    )
    assert command_parser(name).format_help().startswith(f"usage: {program}")
    assert callable(commands.command_run(name))


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["ps", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys; from dynamo.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert completed.stderr.strip() == "[]"


def test_what_old_deployments_left_loads_no_plane(tmp_path: Path) -> None:
    folder = tmp_path / "dynamo" / "http-8000"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "slo.sqlite").touch()
    (tmp_path / "dynamo").chmod(0o700)
    program = (
        "import sys; from dynamo.runtime.deployment import live_deployments\n"
        "print(live_deployments(), 'asyncio' in sys.modules)"
    )
    environ = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert completed.stdout == "[] False\n"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m dynamo run --help | head -n 1 >/dev/null"
    completed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    assert completed.stderr == ""


@pytest.mark.parametrize("words", ["--help", "ps", "config explain"])
def test_a_full_disk_is_reported_without_a_traceback(words: str) -> None:
    command = f"{sys.executable} -m dynamo {words} > /dev/full"
    completed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    assert completed.returncode == 1
    assert completed.stderr == "error: No space left on device\n"


def test_characters_that_the_terminal_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("dynamo.cli.entry.command_run", lambda name: lambda words: print("é") or 0)
    assert main(["run"]) == 0
    sys.stdout.flush()
    assert raw.getvalue() == b"?\n"


def test_ctrl_c_during_imports_prints_no_traceback() -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "from dynamo.__main__ import main\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dynamo.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main()"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert completed.returncode == -signal.SIGINT
    assert completed.stderr == ""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_become_dev_null(closed: str, tmp_path: Path) -> None:
    """No file or socket gets a number below 3, and what is printed goes nowhere."""
    result = tmp_path / "result"
    program = (
        "import os, sys; from dynamo.__main__ import open_standard_streams\n"
        "open_standard_streams(); print('é', flush=True); print('é', file=sys.stderr, flush=True)\n"
        f"file = open({str(result)!r}, 'w'); sys.stdin.read\n"
        "file.write(f'{file.fileno() > 2} {all(map(os.get_inheritable, range(3)))}')"
    )
    command = ["bash", "-c", f'exec "$@" {closed}', "", sys.executable, "-c", program]
    subprocess.run(command, env={"LC_ALL": "C"}, check=True)

    assert result.read_text() == "True True"


def test_credentials_in_urls_are_redacted_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "http://u:p@a,https://u:p@b"]) == 2
    assert "'http://***@a,https://***@b'" in capsys.readouterr().err
    main(["doctor", "--model-path", "http://u:p@a"])
    assert "http://***@a" in capsys.readouterr().out
