"""Models that are added to a running deployment, and the settings file that lists them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, ModelUnavailable
from dynamo.core.settings import Settings, SourcedValue
from dynamo.core.settings.document import (
    edit_adapters,
    edit_alias,
    edit_models,
    parse_config_document,
)
from dynamo.core.settings.load import with_model_entry
from dynamo.core.settings.schema_cluster import WorkersSettings
from dynamo.core.settings.server_url import lacks_tokenizer
from dynamo.inference.engines.choice import with_engine
from dynamo.models.file_cache import atomic_replacement
from dynamo.models.location import locate_model
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.standby import with_standbys
from dynamo.services.deployment.accelerators import assign_cards
from dynamo.services.deployment.memory_needs import check_standby_memory, with_memory
from dynamo.services.deployment.model_groups import (
    check_adapter_names,
    group_specs,
    model_names,
    model_worker_groups,
)

ORIGIN = "dynamo add"
STOP_ORDER = 1 << 10
"""Workers of added models stop with the last ones."""


def added_model_specs(
    settings: Settings, entry: Mapping[str, Any], other_workers: int, spare_bytes: int = 0
) -> Sequence[ChildSpec]:
    """Return the processes of an entry of `models` for a deployment with these settings, whose
    models leave `spare_bytes` (0: unknown). Blocks. Raises `ConfigError` and `ModelUnavailable`."""
    model = with_engine(with_model_entry(_defaults(settings), sourced_entry(entry)))
    if model.engine.urls and model.engine.standby == settings.engine.standby:
        model = replace(model, engine=replace(model.engine, standby=0))  # meant for other models
    if not lacks_tokenizer(model):
        locate_model(model.model.path)
    names = model_names(model)
    if not names:
        raise ConfigError("the model has no name", hint="give it one with --model-name NAME")
    groups = model_worker_groups(model, names[0], other_workers + model.worker_count)
    if not any(group.settings.engine.role != "prefill" for group in groups):
        raise ConfigError(
            f"{names[0]} would have no worker that computes answers",
            hint="give --workers N, or --decode-workers N beside --prefill-workers",
        )
    check_adapter_names(model, names)
    specs = with_standbys(group_specs(groups))
    check_standby_memory(specs)
    return with_memory(
        assign_cards(
            [replace(spec, stop_order=STOP_ORDER, needs_preparation=False) for spec in specs]
        ),
        spare_bytes,
    )


def sourced_entry(entry: Mapping[str, Any]) -> Mapping[str, SourcedValue]:
    """Return the values of an entry with where they come from."""
    return {
        key: SourcedValue(
            [sourced_entry(each) for each in value]
            if isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
            else value,
            ORIGIN,
        )
        for key, value in entry.items()
    }


def _defaults(settings: Settings) -> Settings:
    """Return settings without what belongs to a model that the deployment serves already."""
    engine = replace(
        settings.engine,
        workers=1,
        role="both",
        urls=(),
        url_model="",
        url_kv_events=(),
        lora_modules=(),
        device_ids=(),
    )
    return replace(
        settings,
        engine=engine,
        workers=WorkersSettings(),
        prefill_workers=(),
        decode_workers=(),
        models=(),
    )


def save_model(path: str, entry: Mapping[str, Any] | None, name: str) -> str:
    """Change the list `models` of a settings file: write an entry, delete that of a name, change
    its `adapters`, or move an `alias` to it. An alias without a name is deleted. Returns the file,
    whose other lines and mode stay as they are. Blocks. Raises `ConfigError`."""
    if not path:
        raise ConfigError(
            "the deployment was started without a settings file, so nothing is saved",
            hint="start it with -f FILE, whose list `models` names its models",
        )
    file = Path(path).expanduser().resolve()
    try:
        text = file.read_text(encoding="utf-8")
        if entry and "alias" in entry:
            changed = edit_alias(text, entry["alias"], name)
        elif entry and name:
            changed = edit_adapters(text, name, entry["adapters"])
        else:
            changed = edit_models(text, entry, name)
        parse_config_document(changed, path)
        with atomic_replacement(file) as part:
            part.write_text(changed, encoding="utf-8")
            shutil.copymode(file, part)
    except OSError as error:
        raise ConfigError(f"{path} is not changed: {error.strerror}") from None
    except ModelUnavailable as error:
        raise ConfigError(f"{path} is not changed: {error.message}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not changed: {error}") from None
    return path
