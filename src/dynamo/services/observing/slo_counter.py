"""Counts the requests of a process that kept their promise, and those that did not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo.application.http_errors import client_error_codes
from dynamo.core.settings import Settings
from dynamo.operations.alerts.rules import FIRST_TOKEN_PROMISE_S
from dynamo.runtime.deployment import deployment_of
from dynamo.telemetry.metrics import Registry
from dynamo.telemetry.slo import FAILED, GOOD, SloCounts, judge_slo
from dynamo.telemetry.story import EndedStory

BOOKS_FILE = "slo.sqlite"


def promised_ttft_s(settings: Settings) -> float:
    """Return the promised time to the first token in seconds."""
    return settings.observer.ttft_slo or settings.router.ttft_slo or FIRST_TOKEN_PROMISE_S


def slo_file(settings: Settings) -> Path:
    """Return the path of the books; its folder exists. Raises `ConfigError`, `OSError`."""
    if settings.observer.slo_file:
        return Path(settings.observer.slo_file).expanduser()
    deployment = deployment_of(settings)
    deployment.create_folder()
    return deployment.folder / BOOKS_FILE


class SloCounter:
    """Judges ended stories, and has the sums since the process has started, by model. The metric
    has the models that are in `served` at a scrape."""

    def __init__(self, settings: Settings, metrics: Registry, served: Mapping[str, object]) -> None:
        self._served = served
        self._sums: dict[str, SloCounts] = {}
        self._client_errors = client_error_codes()
        self.update_settings(settings)
        metrics.counter(
            "dynamo_slo_requests_total",
            "Requests by promise (an answer, its beginning, its pauses), and whether it was kept",
            ("model", "slo", "outcome"),
            callback=self._by_label,
        )

    def update_settings(self, settings: Settings) -> None:
        """Judge by other promises from now on."""
        self._ttft_us = promised_ttft_s(settings) * 1e6
        self._gap_us = settings.observer.gap_slo * 1e6

    def count(self, story: EndedStory) -> bool:
        """Judge a story, and return whether a promise was broken."""
        sums, ttft_us, gap_us = self._sums.get(story.model), self._ttft_us, self._gap_us
        on_time = (story.first_us or 0) <= ttft_us and story.gap_us <= gap_us
        if on_time and not story.end and sums is not None:  # most requests
            story.slo = GOOD
            sums.requests += 1
            return False
        story.slo = judge_slo(story, ttft_us, gap_us, self._client_errors)
        if story.slo:
            self._sums.setdefault(story.model, SloCounts()).count(story.slo)
        return story.slo >= FAILED

    def sums(self) -> dict[str, tuple[int, ...]]:
        """Return the fields of `SloCounts` by model."""
        return {model: msgspec.structs.astuple(counts) for model, counts in self._sums.items()}

    def _by_label(self) -> Mapping[tuple[str, ...], float]:
        values: dict[tuple[str, ...], float] = {}
        for model in list(self._served):
            counts = self._sums.get(model, SloCounts())
            answered = counts.requests - counts.failed
            for slo, all_of_them, bad in (
                ("availability", counts.requests, counts.failed),
                ("ttft", answered, counts.late_first),
                ("itl", answered, counts.late_gap),
            ):
                values[model, slo, "good"] = all_of_them - bad
                values[model, slo, "bad"] = bad
        return values
