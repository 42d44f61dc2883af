"""The processes of a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.services.test_plan import Front, plan_of, shape

from dynamo.cli.inputs.temporary import temporary_settings
from dynamo.communication.http import PortInUse
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_monitoring import MonitoringSettings, PrometheusSettings
from dynamo.services.deployment.launch import (
    create_service,
    deployment_specs,
    reserve_observer_port,
    with_observer_port,
)
from dynamo.services.observing.prometheus import warn_if_missing
from dynamo.services.router import replica_index


def test_one_frontend_and_one_worker_by_default() -> None:
    specs = deployment_specs(Settings())
    assert [(spec.role, spec.name, spec.stop_order) for spec in specs] == [
        ("frontend", "frontend", 0),
        ("worker", "worker", 1),
        ("observer", "observer", 2),
    ]
    assert specs[0].argv[1:] == ("-P", "-m", "dynamo", "_child", "frontend")


def test_router_processes_stop_between_frontends_and_workers() -> None:
    settings = Settings()
    settings = replace(settings, router=replace(settings.router, replicas=2))
    assert [(spec.role, spec.name, spec.stop_order) for spec in deployment_specs(settings)] == [
        ("frontend", "frontend", 0),
        ("router", "router-1", 1),
        ("router", "router-2", 1),
        ("worker", "worker", 2),
        ("observer", "observer", 3),
    ]
    assert [replica_index(name) for name in ("router", "Router-1", "router-2")] == [0, 0, 1]


def test_replicas_are_numbered() -> None:
    settings = Settings()
    settings = replace(
        settings,
        server=replace(settings.server, http_workers=2),
        engine=replace(settings.engine, workers=3),
    )
    assert [spec.name for spec in deployment_specs(settings)] == [
        "frontend-1",
        "frontend-2",
        "worker-1",
        "worker-2",
        "worker-3",
        "observer",
    ]


def test_a_deployment_may_have_no_observer() -> None:
    settings = Settings()
    settings = replace(settings, observer=replace(settings.observer, enabled=False))
    assert [spec.name for spec in deployment_specs(settings)] == ["frontend", "worker"]


def test_the_observer_has_a_port_of_its_own() -> None:
    settings = Settings()
    settings = replace(settings, runtime=replace(settings.runtime, deployment="a-name"))
    with reserve_observer_port(settings) as usual:
        port = usual.getsockname()[1]
        with reserve_observer_port(settings) as other:
            assert other.getsockname()[1] != port
        wanted = replace(settings, observer=replace(settings.observer, port=port))
        with pytest.raises(PortInUse) as caught:
            reserve_observer_port(wanted)
        assert "--observer.port" in caught.value.hint
    with reserve_observer_port(settings) as again:
        assert again.getsockname()[1] == port
    specs = with_observer_port(deployment_specs(settings), port)
    assert [spec.task for spec in specs] == [{}, {}, {"port": port}]


def test_a_prometheus_runs_where_it_is_wanted_and_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Settings(monitoring=MonitoringSettings(PrometheusSettings(enabled=True)))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "prometheus" not in {spec.role for spec in deployment_specs(wanted)}
    warn_if_missing(wanted.monitoring.prometheus)
    assert "PATH has no program `prometheus`" in caplog.text

    (tmp_path / "prometheus").write_text("")
    (tmp_path / "prometheus").chmod(0o755)
    caplog.clear()
    warn_if_missing(wanted.monitoring.prometheus)
    warn_if_missing(PrometheusSettings())
    assert not caplog.text
    assert deployment_specs(wanted)[-1].role == "prometheus"
    assert "prometheus" not in {spec.role for spec in deployment_specs(Settings())}
    temporary = temporary_settings(wanted, "bench")
    assert "prometheus" not in {spec.role for spec in deployment_specs(temporary)}
    plan = plan_of(Front, monitoring__prometheus__enabled=True)
    assert shape(plan)[-1] == ("prometheus", "Prometheus", 1)


def test_an_unknown_role_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        create_service("fronted")
    assert "frontend" in caught.value.hint
