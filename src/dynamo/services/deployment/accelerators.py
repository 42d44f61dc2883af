"""The accelerators of this host: the supervisor gives each worker cards of its own."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from msgspec.structs import replace

from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.inference.engines.arguments import ENGINE_TABLES, PassedSetting
from dynamo.inference.engines.packages import CARD_ENGINES, package_kind
from dynamo.inference.torch.device import wants_card
from dynamo.runtime.deployment import live_processes
from dynamo.runtime.processes.child import CARDS_VARIABLE
from dynamo.runtime.processes.child_spec import ChildSpec

log = logging.getLogger(__name__)

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_DEVICE_FILE = re.compile(r"nvidia\d+\Z")


def find_cards(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the names of the cards that this process may use, as CUDA_VISIBLE_DEVICES has them:
    numbers, UUIDs or names of MIG parts. None: the variable is not set and there are no cards."""
    visible = environ.get(CARDS_VARIABLE)
    if visible is None:
        count = sum(bool(_DEVICE_FILE.match(path.name)) for path in Path("/dev").iterdir())
        return [str(number) for number in range(count)] or None
    cards: list[str] = []
    for name in map(str.strip, visible.split(",")):
        if not name or name.startswith("-") or name.lower() in {"none", "nodevfiles"}:
            break  # CUDA ignores what follows an invalid name
        cards.append(str(int(name)) if name.isdecimal() else name)
    return list(dict.fromkeys(cards))


def cards_needed(settings: Settings) -> int:
    """Return how many cards a worker with these settings computes on; 0: none."""
    engine, kind = settings.engine, package_kind(settings.engine.kind)
    if kind == "native":
        return int(wants_card(engine))  # ranks of a worker share it
    if kind not in CARD_ENGINES or engine.args.get("device") == "cpu" or _is_cpu_build(kind):
        return 0
    needed = 1
    for name in _SIZES:
        row = ENGINE_TABLES[kind].get(f"engine.{name}")
        size = getattr(engine, name)
        if isinstance(row, PassedSetting):
            size = engine.args.get(row.name, size)
        needed *= size if isinstance(size, int) and size > 0 else 1
    return needed


def cards_of_others() -> dict[str, str]:
    """Return the cards that other deployments on this host hold, each with its holder. Blocks."""
    return {
        card: f"{name} of {record.deployment}"
        for record in live_processes()
        for name, cards in record.cards_by_name.items()
        for card in cards
    }


def assign_cards(
    specs: Sequence[ChildSpec], environ: Mapping[str, str] = os.environ
) -> Sequence[ChildSpec]:
    """Return the specs with cards of their own for the workers that need some. Raises `ConfigError`
    if there are too few."""
    workers = [spec for spec in specs if spec.role == "worker" and cards_needed(spec.settings)]
    needed = {spec.name: cards_needed(spec.settings) for spec in workers}
    visible = find_cards(environ)
    if not workers or (visible is None and not any(map(_card_list, workers))):
        return specs
    # `lists`: the cards that are left of each list of a worker group; `free`: of all others.
    held = cards_of_others()
    free = [card for card in visible or () if card not in held]
    free_at_start = len(free)
    lists: dict[tuple[int, ...], list[str]] = {}
    assigned: dict[str, tuple[str, ...]] = {}
    for spec in sorted(workers, key=lambda spec: not _card_list(spec)):  # lists first
        count, numbers = needed[spec.name], _card_list(spec)
        if numbers and numbers not in lists:
            lists[numbers] = _named_cards(numbers, visible, held)
        if not numbers and visible is None:
            continue
        pool = lists[numbers] if numbers else free
        if len(pool) < count:
            total = sum(needed[each.name] for each in workers if _card_list(each) == numbers)
            raise _too_few_error(spec.name, count, total, free_at_start, numbers, held)
        assigned[spec.name] = cards = tuple(pool[:count])
        # A listed card may be one of `free`, too.
        del pool[:count]
        free[:] = [card for card in free if card not in cards]
    _log_cards(assigned, [*free, *(card for cards in lists.values() for card in cards)])
    return [
        replace(spec, cards=assigned[spec.name], settings=_without_list(spec.settings))
        if spec.name in assigned
        else spec
        for spec in specs
    ]


def keep_cards(specs: Sequence[ChildSpec], before: Sequence[ChildSpec]) -> Sequence[ChildSpec]:
    """Return specs of reloaded settings with the cards that their processes had at the start."""
    cards = {spec.name: spec.cards for spec in before if spec.cards}
    return [
        replace(spec, cards=cards[spec.name], settings=_without_list(spec.settings))
        if spec.name in cards
        else spec
        for spec in specs
    ]


def _card_list(spec: ChildSpec) -> tuple[int, ...]:
    return spec.settings.engine.device_ids


def _without_list(settings: Settings) -> Settings:
    return replace(settings, engine=replace(settings.engine, device_ids=()))


def _named_cards(
    numbers: Sequence[int], visible: Sequence[str] | None, held: Mapping[str, str]
) -> list[str]:
    """Return the names of listed cards: their numbers, or the entries of CUDA_VISIBLE_DEVICES at
    these positions if it has no numbers. A listed card may be shared with another deployment."""
    cards = [str(number) for number in numbers]
    if visible is not None:
        if visible and not any(name.isdecimal() for name in visible):
            cards = [visible[n] if n < len(visible) else str(n) for n in numbers]
        if unknown := [card for card in cards if card not in visible]:
            raise ConfigError(
                f"device_ids names the cards {', '.join(unknown)}; those that can be used are "
                f"{', '.join(visible) or 'none'}",
                hint=f"change engine.device_ids, or {CARDS_VARIABLE}",
                param="engine.device_ids",
            )
    for card in dict.fromkeys(cards):
        if card in held:
            fields = {"card": card, "holder": held[card]}
            log.warning("a card is shared with another deployment", extra={"fields": fields})
    return cards


def _too_few_error(
    name: str,
    needed: int,
    total: int,
    free: int,
    numbers: Sequence[int],
    held: Mapping[str, str],
) -> ConfigError:
    there = f"{len(numbers)} are listed" if numbers else f"{free} are free"
    holders = "; ".join(f"card {card} is held by {holder}" for card, holder in held.items())
    return ConfigError(
        f"the workers need {total} cards and {there}; {name} would be without its {needed}"
        + (f"; {holders}" if holders and not numbers else ""),
        hint="start fewer or smaller workers, stop a deployment, or give --device-ids (a card that "
        "is listed twice is shared)",
        param="engine.device_ids",
    )


def _log_cards(assigned: Mapping[str, Sequence[str]], left_over: Sequence[str]) -> None:
    for name, cards in assigned.items():
        log.info("a worker has cards", extra={"fields": {"name": name, "cards": ",".join(cards)}})
    if left_over:
        fields = {"cards": ",".join(dict.fromkeys(left_over))}
        log.info("no worker uses these cards", extra={"fields": fields})


def _is_cpu_build(kind: str) -> bool:
    """Whether the installed engine is a build that computes on the CPU."""
    try:
        return "cpu" in metadata.version(kind)
    except metadata.PackageNotFoundError:
        return False
