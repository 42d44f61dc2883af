"""`AutoTuner`: recommends settings by replays of a record, and tries them on a deployment."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError, DynamoError
from dynamo.core.settings.schema_planner import TunerSettings
from dynamo.operations.tuner.search import Recommendation, SettingSearch
from dynamo.operations.tuner.verdict import TrialVerdict

log = logging.getLogger(__name__)

KINDS = {"engine": "worker", "router": "frontend"}
"""The kind of processes that read the settings of a section."""

MakeSearch = Callable[[], SettingSearch]
RunWork = Callable[[MakeSearch], Awaitable[SettingSearch]]
RunRound = Callable[[str, Mapping[str, Any]], Awaitable[TrialVerdict]]
"""Tries values on a process of a kind, and then on all of it or none."""


class AutoTuner:
    """Finds better settings (`search`), and tries them (`run_round`) with a way back."""

    def __init__(
        self,
        config: TunerSettings | None = None,
        search: MakeSearch | None = None,
        run_round: RunRound | None = None,
        clock: Clock | None = None,
        run_work: RunWork | None = None,
    ) -> None:
        """`run_work` runs searches beside the event loop (default: on a thread of the clock)."""
        self.config = config or TunerSettings()
        self._search = search
        self._run_round = run_round
        self._clock = clock or SystemClock()
        self._run_work = run_work or self._clock.offload

    async def generate_recommendations(
        self, performance_metrics: object = None, bottlenecks: object = None
    ) -> Sequence[Recommendation]:
        """Return what is safe and gains enough, the best first. The record has all figures, so the
        arguments are not read. Raises `ConfigError` without a search."""
        del performance_metrics, bottlenecks
        if self._search is None:
            raise ConfigError(
                "the tuner has no record to search",
                hint="AutoTuner(config, search); `dynamo tune` makes a search of a record",
            )
        make_search = self._search

        def run_search() -> SettingSearch:
            search = make_search()
            search.run()
            return search

        return self.select(await self._run_work(run_search))

    def select(self, search: SettingSearch) -> Sequence[Recommendation]:
        """Return the recommendations of a search that are safe and gain enough."""
        better = search.recommendations(self.config.min_improvement_threshold)
        return [each for each in better if each.safety_score > self.config.min_safety_score]

    async def apply(self, recommendation: Recommendation) -> Sequence[TrialVerdict]:
        """Try a recommendation: a round for each kind of process that reads its settings. Returns
        their verdicts. Raises as `RunRound`."""
        if self._run_round is None:
            raise ConfigError("the tuner has no deployment", hint="AutoTuner(run_round=...)")
        verdicts = []
        for section, kind in KINDS.items():
            values = {
                key: value
                for key, value in recommendation.after.items()
                if key.partition(".")[0] == section
            }
            if values:
                verdicts.append(await self._run_round(kind, values))
        return verdicts

    async def run(self) -> None:
        """Search and try the best now and then, until cancelled."""
        while True:
            await self._clock.sleep(self.config.auto_tune_interval)
            try:
                for best in (await self.generate_recommendations())[:1]:
                    for verdict in await self.apply(best):
                        fields = {"settings": dict(best.after), "kept": verdict.keep}
                        log.info("settings tried: %s", verdict.why, extra={"fields": fields})
            except (DynamoError, OSError) as error:
                log.info("nothing is tuned", extra={"fields": {"reason": str(error)}})
