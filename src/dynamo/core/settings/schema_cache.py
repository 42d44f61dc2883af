"""The section `cache`: the tiers that hold KV blocks below a worker's own."""

from __future__ import annotations

from dynamo.core.settings.declare import SettingsSection, setting

OFFLOAD_TARGETS = {
    "cpu": "host",
    "host": "host",
    "ssd": "disk",
    "disk": "disk",
    "remote": "shared",
    "shared": "shared",
}
"""Items of `cache.offload_targets` -> the tier of KV events."""
CODECS = ("none", "zstd", "int8")


class CacheSettings(SettingsSection, frozen=True):
    """KV blocks of each worker besides those of its engine: in host memory, on disk, in a store.

    Without a size, a URL or `enable_offloading` there are no such tiers.
    """

    max_cache_size: int = setting(
        0,
        "memory for the engine's own KV blocks, unless `engine.num_blocks` is set; 0: the engine "
        "decides",
        unit="bytes",
        ge=0,
    )
    enable_offloading: bool = setting(
        False,
        "use all `offload_targets`. Each without a size gets that of the engine's own KV blocks",
    )
    offload_targets: tuple[str, ...] = setting(
        ("cpu",), "tiers for `enable_offloading`: cpu, ssd, remote"
    )
    offload_policy: str = setting(
        "worth",
        "which blocks go down a tier. worth: to host memory all, unless computing is much quicker "
        "than loading; further down those that were reused. lru: all, to every tier",
        flag="--kv-offload-policy",
        choices=("worth", "lru"),
    )
    cpu_size: int = setting(
        0,
        "host memory of each worker for KV blocks; 0: none",
        flag="--kv-host-size",
        unit="bytes",
        ge=0,
        aliases=("host_size",),
    )
    ssd_size: int = setting(
        0,
        "disk space of each worker for KV blocks, which outlive a restart; 0: none",
        flag="--kv-disk-size",
        unit="bytes",
        ge=0,
        aliases=("disk_size",),
    )
    ssd_path: str = setting(
        "",
        "folder on the disk for KV blocks, shared by the workers of this host; empty: "
        "`dynamo/kv` in $XDG_CACHE_HOME or ~/.cache",
        flag="--kv-disk-path",
        aliases=("disk_path",),
    )
    ssd_compression: str = setting(
        "none",
        "encoding of blocks on disk: zstd is lossless; int8 leaves a third of float32, two thirds "
        "of 16 bits, and may change texts",
        choices=CODECS,
    )
    remote_url: str = setting(
        "",
        "object store for KV blocks, shared by all workers: s3://BUCKET/PREFIX. Credentials and "
        "address come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
        "AWS_ENDPOINT_URL)",
        flag="--kv-remote-url",
    )
    remote_size: int = setting(
        0,
        "the KV blocks of one model in the store; above it, workers delete the oldest; 0: no limit",
        flag="--kv-remote-size",
        unit="bytes",
        ge=0,
    )
    remote_compression: str = setting(
        "none",
        "encoding of blocks in the store: zstd is lossless; int8 leaves a third of float32, two "
        "thirds of 16 bits, and may change texts",
        choices=CODECS,
    )

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers in use, by their names in KV events, fastest first."""
        targets = self.offload_targets if self.enable_offloading else ()
        wanted = {OFFLOAD_TARGETS[name] for name in targets}
        sizes = {"host": self.cpu_size, "disk": self.ssd_size, "shared": self.remote_url}
        return tuple(name for name, size in sizes.items() if size or name in wanted)


NO_TIERS = CacheSettings()
