"""The sections of the served model, and of several models."""

from __future__ import annotations

from dynamo.core.settings.declare import SettingsSection, setting
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_cluster import WorkerGroupSettings
from dynamo.core.settings.schema_engine import EngineSettings

ALWAYS, ON_DEMAND = "always", "on_demand"
DEFAULT_KEEP_ALIVE_S = 600.0


class ModelSettings(SettingsSection, frozen=True):
    """The served model."""

    path: str = setting(
        "", "model folder, GGUF file or hub name; empty: the default model", flag="--model-path"
    )
    names: tuple[str, ...] = setting(
        (),
        "served name, then aliases; `model.name` in a source without a path is the model's hub "
        "name",
        flag="--model-name",
        aliases=("name",),
    )
    context_tokens: int = setting(
        0,
        "longest prompt plus answer; 0: the model's limit",
        flag="--max-model-len",
        unit="tokens",
        ge=0,
        aliases=("max_model_len",),
    )
    tool_format: str = setting(
        "",
        "family whose reasoning and tool calls the model writes, e.g. qwen3-hermes, or a name of "
        "other servers for it; empty: the family of the chat template",
        flag="--tool-format",
        aliases=("tool_call_parser",),
    )
    load: str = setting(
        ALWAYS,
        "when its workers run: always, or on_demand: from its first request until `keep_alive` "
        "after its last one, or until another model needs the memory",
        flag="--load",
        choices=(ALWAYS, ON_DEMAND),
    )
    keep_alive: float = setting(
        DEFAULT_KEEP_ALIVE_S,
        "with load on_demand: time without requests after which its workers end",
        flag="--keep-alive",
        unit="seconds",
        ge=0,
    )
    memory: int = setting(
        0,
        "memory of each of its workers; 0: what its weights and a small cache need",
        flag="--memory",
        unit="bytes",
        ge=0,
    )

    @property
    def on_demand(self) -> bool:
        """Whether workers are started at the first request."""
        return self.load == ON_DEMAND


class ModelEntrySettings(ModelSettings, frozen=True):
    """An entry of `models`. A setting that an entry leaves out has the value of the file's own
    sections."""

    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    prefill_workers: tuple[WorkerGroupSettings, ...] = setting(
        (), "groups of the model's workers that only compute prompts"
    )
    decode_workers: tuple[WorkerGroupSettings, ...] = setting(
        (), "groups of the model's workers that compute answers"
    )


MODEL_ENTRY_ALIASES = {
    "engine": "engine.kind",
    "workers": "engine.workers",
    "adapters": "engine.lora_modules",
}
"""Short keys of an entry of `models` -> its setting. `engine` may be a section, too."""


class StoreSettings(SettingsSection, frozen=True):
    """The model store: fetched models on this machine."""

    budget: int = setting(
        0,
        "most bytes of fetched models on this machine: those that were not used for long are "
        "deleted for others; 0: no limit",
        unit="bytes",
        ge=0,
    )
    offline: bool = setting(
        False, "ask no hub and no bucket for models: only this machine and peers"
    )
