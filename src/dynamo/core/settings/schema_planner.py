"""The sections of the planner, which changes the number of workers, the tuner and the observer."""

from __future__ import annotations

from dynamo.core.plugins import PLANNER_CONNECTORS, PLANNER_POLICIES, PLANNER_PREDICTORS
from dynamo.core.settings.declare import SettingsSection, setting


class PlannerSettings(SettingsSection, frozen=True):
    """The planner, which keeps promised latencies with the fewest workers."""

    enabled: bool = setting(False, "change the number of workers by the load", flag="--planner")
    policy: str = setting(
        "flow",
        "how the wanted sizes are found; flow: forecast work with headroom that is learnt, rule: a "
        "share of time that is busy, throughput and load: NVIDIA Dynamo's, static: `planner.sizes`",
        choices=tuple(PLANNER_POLICIES.builtin),
        plugins=PLANNER_POLICIES,
    )
    predictor: str = setting(
        "adaptive",
        "how work is forecast",
        choices=tuple(PLANNER_PREDICTORS.builtin),
        plugins=PLANNER_PREDICTORS,
    )
    connector: str = setting(
        "local",
        "what changes the workers; local: the supervisor of this host, kubernetes: the adapters of "
        "this pod's graph, virtual: decisions in discovery, which another program carries out",
        choices=tuple(PLANNER_CONNECTORS.builtin),
        plugins=PLANNER_CONNECTORS,
    )
    ttft: float = setting(
        0.0,
        "promised time to the first token; 0: `router.ttft_slo`, else none",
        unit="seconds",
        ge=0,
    )
    itl: float = setting(
        0.0,
        "promised mean time between tokens; 0: `router.disaggregation.itl_slo`, else none",
        unit="milliseconds",
        ge=0,
    )
    budget: int | None = setting(
        None,
        "GPUs that all workers hold together at most, those that start or drain too; null: no "
        "limit",
        ge=1,
        reload=True,
    )
    min: int = setting(1, "fewest workers of a kind", ge=0, reload=True)
    max: int = setting(0, "most workers of a kind; 0: no limit", ge=0, reload=True)
    sizes: tuple[str, ...] = setting((), "policy static: the size of each kind, as worker=3")
    hold_s: float = setting(
        900.0, "how long a size that somebody else has set is left alone", unit="seconds", ge=0
    )
    cooldown: float = setting(
        60.0, "time after growth in which a kind does not shrink", unit="seconds", ge=0
    )
    start_timeout: float = setting(
        600.0, "workers that have not started after this time are withdrawn", unit="seconds", ge=1
    )


class TunerSettings(SettingsSection, frozen=True):
    """The tuner, which tries other settings on recorded requests, and then on one process."""

    auto_tune_interval: float = setting(
        0.0,
        "time between two rounds of tuning while serving, by the process of the planner (policy "
        "static leaves the sizes); 0: only `dynamo tune`",
        unit="seconds",
        ge=0,
    )
    min_safety_score: float = setting(
        0.9,
        "a recommendation needs a higher share of resampled records in which nothing gets worse: "
        "no promise, and by more than 2 % neither the 99th percentiles of TTFT and ITL without a "
        "promise nor tokens/s",
        unit="ratio",
        ge=0,
        le=1,
    )
    min_improvement_threshold: float = setting(
        0.05,
        "settings that gain less are not recommended, and are taken back",
        unit="ratio",
        ge=0,
        le=1,
    )
    tuning_observation_period: float = setting(
        300.0,
        "how long a process with other settings is compared with its siblings",
        unit="seconds",
        ge=1,
    )


class ObserverSettings(SettingsSection, frozen=True):
    """The process that keeps what became of requests, for `dynamo why`, `explain` and `router`."""

    enabled: bool = setting(
        True,
        "run the observer, to which frontends send the story of each request",
        flag="--observer",
    )
    host: str = setting("127.0.0.1", "address of the observer's HTTP port")
    port: int = setting(
        0,
        "the observer's HTTP port; 0: one by the deployment's name, or any if it is in use",
        ge=0,
        le=65535,
    )
    ttft_slo: float = setting(
        0.0,
        "promised time to the first token, for `dynamo slo`; 0: `router.ttft_slo`, else 5 s",
        unit="seconds",
        ge=0,
    )
    gap_slo: float = setting(
        2.0, "promised longest time between two texts of an answer", unit="seconds", ge=0.001
    )
    slo_target: float = setting(
        0.999,
        "promised share of requests that are answered right and in time",
        unit="ratio",
        ge=0.5,
        le=0.999999,
    )
    slo_file: str = setting(
        "", "SQLite file with the counts of 30 days; empty: in the deployment's state folder"
    )
