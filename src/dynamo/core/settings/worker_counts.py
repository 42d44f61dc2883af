"""Which settings count the workers, where flags, environment and file do so in several ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo.core.errors import ConfigError
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.values import SourcedValue, parse_value

WORKERS_KEY = "engine.workers"
FLEXIBLE_WORKERS_KEY = "workers.flexible"
PREFILL_COUNTS = ("workers.prefill.replicas", "prefill_workers")
DECODE_COUNTS = ("workers.decode.replicas", "decode_workers")
WORKER_COUNTS = (FLEXIBLE_WORKERS_KEY, *PREFILL_COUNTS, *DECODE_COUNTS)
"""Settings that count workers instead of `engine.workers`."""
BOTH_COUNTS = (WORKERS_KEY, FLEXIBLE_WORKERS_KEY)
"""Settings that count workers with both roles."""
BESIDE_GROUPS = "beside"
"""Begins the origin of an `engine.workers` that is 0 since there are worker groups."""

Layer = Mapping[str, SourcedValue]


def use_strongest_worker_counts(
    layers: Sequence[Layer],
) -> tuple[Sequence[Layer], Mapping[str, str]]:
    """Drop counts of workers that a stronger layer replaces. Adds notes. Raises `ConfigError` for
    a layer that gives workers with both roles two numbers."""
    holding: dict[str, str] = {}
    remaining: list[Layer] = []
    notes: dict[str, str] = {}
    for layer in layers:
        dropped = {key: holding[key] for key in (WORKERS_KEY, *WORKER_COUNTS) if key in holding}
        if _is_flexible(layer):
            dropped.setdefault(WORKERS_KEY, FLEXIBLE_WORKERS_KEY)
        left = {key: value for key, value in layer.items() if key not in dropped}
        notes |= {key: f"{dropped[key]} is given and holds" for key in dropped if key in layer}
        remaining.append(left)
        for key in (WORKERS_KEY, *WORKER_COUNTS):
            if key in left:
                holding = dict.fromkeys(_replaced_counts(key, left), key) | holding
    return remaining, notes


def workers_beside_groups(layers: Sequence[Layer]) -> Layer:
    """Derive `engine.workers` where other settings count the workers, and the mode of flexible
    ones. Each count is in one layer."""
    counts = {key: layer[key] for key in WORKER_COUNTS for layer in layers if key in layer}
    counts = {key: source for key, source in counts.items() if _is_positive(key, source)}
    flexible = counts.get(FLEXIBLE_WORKERS_KEY)
    if flexible is not None:
        origin = f"{FLEXIBLE_WORKERS_KEY}, {flexible.origin}"
        mode = SourcedValue("flexible", origin)
        return {
            WORKERS_KEY: SourcedValue(flexible.raw, origin),
            "router.disaggregation.mode": mode,
        }
    if not counts:
        return {}
    return {WORKERS_KEY: SourcedValue(0, f"{BESIDE_GROUPS} {', '.join(counts)}")}


def _replaced_counts(key: str, layer: Layer) -> Iterator[str]:
    """Yield the counts of weaker layers that one of this layer replaces: those of the same workers.
    A count of workers with both roles also replaces groups, and the other way round; 0 does not,
    unless `engine.workers: 0` leaves its layer without workers."""
    if key not in BOTH_COUNTS:
        yield from PREFILL_COUNTS if key in PREFILL_COUNTS else DECODE_COUNTS
        if _is_positive(key, layer[key]):
            yield from BOTH_COUNTS
        return
    yield from BOTH_COUNTS
    none_left = key == WORKERS_KEY and not any(
        _is_positive(other, layer[other]) for other in WORKER_COUNTS if other in layer
    )
    if none_left or _is_positive(key, layer[key]):
        yield from (*PREFILL_COUNTS, *DECODE_COUNTS)


def _is_flexible(layer: Layer) -> bool:
    """Whether a layer counts flexible workers. Raises `ConfigError` if it counts them twice."""
    flexible, workers = layer.get(FLEXIBLE_WORKERS_KEY), layer.get(WORKERS_KEY)
    if flexible is None or not _is_positive(FLEXIBLE_WORKERS_KEY, flexible):
        return False
    if workers is None or not _is_positive(WORKERS_KEY, workers):
        return True
    if str(workers.raw).strip() != str(flexible.raw).strip():
        raise ConfigError(
            f"{WORKERS_KEY} = {workers.raw} ({workers.origin}) and {FLEXIBLE_WORKERS_KEY} = "
            f"{flexible.raw} ({flexible.origin}) count the same workers",
            hint="give one of them",
            param=FLEXIBLE_WORKERS_KEY,
        )
    return True


def _is_positive(key: str, source: SourcedValue) -> bool:
    """Whether a setting counts a worker. True for a wrong value: the merge refuses it."""
    spec, raw = setting_specs_by_key()[key], source.raw
    if spec.entry_schema is not None:
        return bool(raw.strip("[] ") if isinstance(raw, str) else raw)
    try:
        return bool(parse_value(spec, raw) > 0)
    except ValueError:
        return True
