"""Messages that docs/how-to/troubleshooting.md quotes: each is provoked, and its remedy mends it.

Tests here are decorated with the message. Others are named in `ELSEWHERE`, with a part of the
message that they assert.
"""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from tests.conftest import until
from tests.faults.cluster import Cluster

from dynamo.cli.stop import select_deployments
from dynamo.communication.discovery.folder_secret import SECRET_FILE, open_secret
from dynamo.communication.http import PortInUse, WebAccess
from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError, Forbidden, ModelUnavailable
from dynamo.core.settings import Settings, resolve_settings
from dynamo.core.settings.schema import ServerSettings
from dynamo.inference.vllm.startup import ADVICE
from dynamo.operations.alerts.evaluator import Firing
from dynamo.operations.alerts.notifications import AlertManager
from dynamo.operations.alerts.rules import RULES
from dynamo.operations.doctor import checks as doctor
from dynamo.runtime.environment import read_secret_file
from dynamo.runtime.processes.disk_space import DiskSpaceMonitor
from dynamo.services.deployment.launch import check_open_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
QUOTED = re.compile(r"^\| (`.*?|.*?`.*?) \| ", re.MULTILINE)
WORDS = re.compile(r"`([^`]*)`")
COMMANDS = re.compile(r"^```bash\n(etcdctl .*?)^```$", re.MULTILINE | re.DOTALL)
Test = TypeVar("Test", bound=Callable[..., Any])
PROVOKED: dict[str, str] = {}


def provokes(message: str) -> Callable[[Test], Test]:
    """Register a test of a quoted message."""

    def register(test: Test) -> Test:
        PROVOKED[message] = test.__name__
        return test

    return register


def check(message: str, text: str) -> None:
    """Assert that the page quotes a message, and that the text is one of this kind."""
    assert f"`{message}`" in PAGE
    pattern = ".+".join(map(re.escape, message.strip(".").split("...")))
    assert re.search(pattern, text), text


def with_server(**fields: Any) -> Settings:
    return Settings(server=ServerSettings(**fields))


@provokes("port 8000 on 127.0.0.1 is in use: ...")
def test_another_port_is_free() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse) as caught:
            doctor.port(with_server(http_port=port))
        text = caught.value.message.replace(str(port), "8000", 1)
        check("port 8000 on 127.0.0.1 is in use: ...", text)
    assert doctor.port(with_server(http_port=port)).verdict == "ok"


@provokes("unknown setting 'server.http_prot'")
def test_the_hint_names_the_setting() -> None:
    text = "server: {http_prot: 8001}"
    with pytest.raises(ConfigError) as caught:
        resolve_settings(document=(text, "config.yaml"))
    check("unknown setting 'server.http_prot'", caught.value.message)
    right = re.search(r"'server\.(\w+)'", str(caught.value.hint))
    assert right is not None
    mended = text.replace("http_prot", right[1])
    assert resolve_settings(document=(mended, "config.yaml")).settings.server.http_port == 8001


@provokes("several deployments are running")
def test_a_deployment_can_be_named() -> None:
    running: Any = [SimpleNamespace(id="http-8000"), SimpleNamespace(id="http-8001")]
    with pytest.raises(ConfigError) as caught:
        select_deployments(running, None)
    check("several deployments are running", caught.value.message)
    assert select_deployments(running, "http-8001") == running[1:]


def refuse(server: ServerSettings, headers: Mapping[bytes, bytes]) -> str:
    """Return why a server on loopback refuses a request; "" if it does not."""
    request: Any = SimpleNamespace(headers=headers, method="POST", path="/")
    try:
        WebAccess.of_api("127.0.0.1", server).check(request)
    except Forbidden as error:
        return error.message
    return ""


@provokes("web pages of ... may not call this server")
def test_the_origin_of_a_page_can_be_allowed() -> None:
    headers = {b"host": b"localhost:8000", b"origin": b"https://app.example"}
    text = refuse(ServerSettings(), headers)
    check("web pages of ... may not call this server", text)
    assert not refuse(ServerSettings(cors_origins=("https://app.example",)), headers)


@provokes("the host name ... is not in server.allowed_hosts")
def test_a_public_name_can_be_allowed() -> None:
    headers = {b"host": b"models.example:8000"}
    check("the host name ... is not in server.allowed_hosts", refuse(ServerSettings(), headers))
    assert not refuse(ServerSettings(allowed_hosts=("models.example",)), headers)
    assert not refuse(ServerSettings(api_keys=("sk-key",)), headers)


@provokes("the secret ... is damaged or open to other users")
def test_a_secret_is_made_again_when_it_was_deleted(tmp_path: Path) -> None:
    root = tmp_path / "discovery"
    root.mkdir(mode=0o700)
    open_secret(root)
    (root / SECRET_FILE).chmod(0o644)
    with pytest.raises(ConfigError) as caught:
        open_secret(root)
    check("the secret ... is damaged or open to other users", caught.value.message)
    Path(str(caught.value.hint).rpartition("delete ")[2]).unlink()
    assert open_secret(root)


@provokes("a process may open ... files and sockets")
def test_the_limit_of_files_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError) as caught:
        check_open_files(8)
    check("a process may open ... files and sockets", caught.value.message)
    needed = int(str(caught.value.hint).rpartition("ulimit -Hn ")[2].strip("`"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (needed, needed))
    check_open_files(8)


@provokes("no process can be added: no space left on the disk of the state folder ...")
async def test_processes_are_added_when_there_is_space_again(tmp_path: Path) -> None:
    room: list[bool] = []
    reserve = SimpleNamespace(fill=lambda: bool(room))
    space = DiskSpaceMonitor(SimpleNamespace(folder=tmp_path, reserve=reserve), SystemClock())  # type: ignore[arg-type]
    with pytest.raises(ModelUnavailable) as caught:
        await space.require_space()
    check(
        "no process can be added: no space left on the disk of the state folder ...",
        caught.value.message,
    )
    room.append(True)
    await space.require_space()


@provokes("..._file = ...: the file is empty")
def test_a_secret_can_be_read_from_a_file_with_text(tmp_path: Path) -> None:
    file = tmp_path / "key"
    environ = {"DYNAMO_SERVER__API_KEYS_FILE": str(file)}

    def read() -> tuple[str, ...]:
        loaded = resolve_settings(environ=environ, read_secret_file=read_secret_file)
        return loaded.settings.server.api_keys

    with pytest.raises(ConfigError, match="No such file"):
        read()
    file.write_text("")
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read()
    check("..._file = ...: the file is empty", caught.value.message.lower())
    file.write_text("sk-1\n")
    assert read() == ("sk-1",)


@provokes("alert alert=...")
async def test_the_line_of_an_alert_says_what_users_notice_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rule = next(rule for rule in RULES if rule.name == "PlaneAway")
    manager = AlertManager(SystemClock(), Settings(), "d")
    await manager.update([Firing(rule, {"plane": "events"}, 0.0)])
    (record,) = caplog.records
    line = f"{record.message} alert={record.fields['alert']}"  # type: ignore[attr-defined]
    check("alert alert=...", line)
    assert rule.felt in str(record.fields)  # type: ignore[attr-defined]
    assert rule.advice in str(record.fields)  # type: ignore[attr-defined]
    await manager.update([])
    assert not manager.active


def test_the_page_says_what_the_hint_for_a_full_card_says() -> None:
    assert "CUDA out of memory" in PAGE
    (advice,) = [text for pattern, text in ADVICE.items() if re.search(pattern, "out of memory")]
    assert "--gpu-memory-utilization" in advice
    assert "gpu_memory_utilization: 0.8" in PAGE


def test_the_commands_for_etcd_show_a_deployment(tiny_model: Path, tmp_path: Path) -> None:
    (block,) = COMMANDS.findall(PAGE)
    with Cluster(tiny_model, tmp_path, "servers", workers=1) as cluster:
        assert cluster.etcd is not None

        def outputs() -> list[str]:
            folder = Path(sys.executable).parent
            url = f"http://127.0.0.1:{cluster.etcd.port}"  # type: ignore[union-attr]
            return [
                subprocess.run(
                    [
                        str(folder / "etcdctl"),
                        *line.replace("http://127.0.0.1:2379", url).split()[1:],
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                for line in block.strip().splitlines()
            ]

        _, keys, processes = until(lambda: all(texts := outputs()) and texts, timeout_s=20)
        assert "/dynamo/workers/worker/generate/" in keys
        assert "/dynamo/models/tiny/" in keys
        assert '"role":"worker"' in processes
        assert '"address":"' in processes


ELSEWHERE = {
    "... log lines were lost because nobody read stderr": (
        "attacks/test_unread_logs.py", "test_ctrl_s_stops_only_the_log", "log lines were lost"
    ),
    "the engine has ... MB of memory and needs ... MB": (
        "unit/inference_native/test_native_parts.py", "", "MB of memory and needs"
    ),
    "the state folder ... cannot be written": (
        "unit/runtime/test_deployment.py", "", "cannot be written"
    ),
    "the state folder ... is ignored": ("unit/runtime/test_state_roots.py", "", "is ignored"),
    "no worker of this model is reachable: ... unreachable: ...": (
        "unit/services/test_model_watcher.py", "", "no worker of this model is reachable"
    ),
    "KV blocks cannot be stored in ...": (
        "unit/inference_native/test_native_stores.py",
        "test_stores_that_cannot_work_are_errors_at_start",
        "cannot be stored",
    ),
    "... has room for ... MiB of KV blocks": (
        "unit/inference_native/test_native_stores.py",
        "test_stores_that_cannot_work_are_errors_at_start",
        "has room for",
    ),
    "access to the bucket ... is denied": (
        "unit/inference_tiers/test_remote_faults.py",
        "test_settings_that_cannot_work_are_refused",
        "is denied",
    ),
    "the bucket ... does not exist": (
        "unit/inference_tiers/test_remote_faults.py",
        "test_settings_that_cannot_work_are_refused",
        "does not exist",
    ),
    "there are no credentials": (
        "unit/inference_tiers/test_remote_faults.py",
        "test_missing_credentials_are_named",
        "no credentials",
    ),
    "the server requires the deployment's secret": (
        "attacks/test_local_users.py", "", "requires the deployment's secret"
    ),
    "process killed: its event loop does not answer": (
        "unit/runtime/test_watchdog.py",
        "test_a_hung_child_is_shown_and_replaced",
        "its event loop does not answer",
    ),
    "the event loop was held ... at=...": (
        "unit/runtime/test_loop_lag.py", "test_the_line_that_holds_the_loop_is_named", "in hold"
    ),
    "process is in a crash loop: it dies before it serves": (
        "unit/runtime/test_process_group.py", "", "in a crash loop: it dies before it serves"
    ),
    "KV memory of a worker is out of reach": (
        "unit/inference_disaggregation/test_workers.py",
        "test_a_worker_whose_memory_is_out_of_reach_is_named",
        "KV memory of a worker is out of reach",
    ),
    "status ports of other hosts listen on loopback and are no targets": (
        "unit/services/test_scrape_targets.py",
        "test_loopback_is_listed_for_processes_of_this_host_alone",
        "set runtime.status_host",
    ),
    "an alert was not sent": (
        "unit/operations/test_alert_notifications.py",
        "test_a_sink_that_fails_is_counted_and_told",
        "an alert was not sent",
    ),
}  # fmt: skip
"""Messages that other tests provoke: file, test, and what they assert of the text."""
CODES = {
    "503 `model_not_ready`": ("integration/test_services.py", "", '(503, "model_not_ready")'),
    "503 `no_workers`": ("integration/test_services.py", "", '(503, "no_workers")'),
    "503 `overloaded`": ("integration/test_overload.py", "", "overloaded"),
    "503 `overloaded`: too many connections are open": (
        "attacks/test_descriptors.py",
        "test_clients_beyond_the_busy_connections_get_a_503",
        "too many connections are open",
    ),
    "413 `request_too_large`": ("unit/application/test_request_limits.py", "", "request_too_large"),
    "503 `overloaded`: the bodies of unfinished requests": (
        "unit/http/test_body_budget.py",
        "test_a_body_beyond_the_budget_is_refused",
        "the bodies of unfinished requests",
    ),
    "400 `context_length_exceeded`": (
        "attacks/test_tokenize.py", "", '(400, "context_length_exceeded")'
    ),
    "404 `not_found`: `a path of Ollama`, or of another server": (
        "unit/application/test_routes_api.py", "", '"/api/chat", "Ollama", "/v1/chat/completions"'
    ),
    "415 `unsupported_media_type`": (
        "unit/application/test_limits_and_access.py", "test_pages_send_json_as_such",
        "unsupported_media_type",
    ),
    "503 `server_stopped`, or a stream that ends with it": (
        "unit/application/test_chat_api.py", "", '(503, "server_stopped")'
    ),
    "a stream ends with `slow_reader`": (
        "unit/application/test_back_pressure.py",
        "test_a_stream_over_its_backlog_limit_ends_with_slow_reader",
        "slow_reader",
    ),
}  # fmt: skip
"""Rows of codes, and the tests that provoke them."""
NO_MESSAGES = re.compile(
    r"limitations|/health|dynamo ps|dynamo_\w+_total|slow_reader|doctor|No such file|"
    r"(queue|admit|prefill|decode|transfer|deliver|tokenise)|"
    r"a path of Ollama|server_stopped|\w+_\w+(_\w+)?|overloaded"
)
"""Words in the first column that are no messages, or codes of errors, which docs/reference lists."""


def test_every_message_of_the_page_is_provoked() -> None:
    quoted = {word for row in QUOTED.findall(PAGE) for word in WORDS.findall(row)}
    messages = {word for word in quoted if not NO_MESSAGES.fullmatch(word)}
    assert messages == PROVOKED.keys() | ELSEWHERE.keys()


def test_every_code_of_the_page_is_provoked() -> None:
    rows = re.findall(
        r"^\| ([^|]*\b[45]\d\d `\w+`[^|]*|[^|]*`slow_reader`) \| ", PAGE, re.MULTILINE
    )
    assert {row for row in rows if not row.startswith("403")} == CODES.keys()


@pytest.mark.parametrize("message", [*ELSEWHERE, *CODES])
def test_other_tests_assert_the_message(message: str) -> None:
    path, name, words = (ELSEWHERE | CODES)[message]
    source = (ROOT / "tests" / path).read_text()
    assert f"def {name}" in source
    assert words in source
