"""The options of a request that concern other callers: its priority and its prefix cache."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from dynamo.application.access import caller_key
from dynamo.communication.http import Request
from dynamo.core.settings.schema import ServerSettings
from dynamo.core.text import TextOptions

SALT_BYTES = 16


class CallerLimits:
    """Keeps callers apart. `needed` is False if only a request with a priority can need `apply`.

    - `priority` is clamped to `server.priority_range`.
    - With several API keys, the cache salt contains a digest of the caller's key. Blocks and cached
      tokens are then those of the same key. `share_cache` is `engine.share_cache`.
    - With several API keys, new forms of answers are tried in turns of the callers.
    """

    def __init__(self, server: ServerSettings, *, share_cache: bool) -> None:
        self._lowest, self._highest = server.priority_range
        self._several = len(set(server.api_keys)) > 1
        self._separates_caches = self._several and not share_cache
        self.needed = self._several or not self._lowest <= 0 <= self._highest

    def apply(self, options: TextOptions, request: Request) -> TextOptions:
        """Return the options that the caller of `request` may have."""
        priority = min(max(options.priority, self._lowest), self._highest)
        if not self._several:
            return replace(options, priority=priority)
        caller, salt = hashlib.sha256(caller_key(request).encode()), options.salt
        if self._separates_caches:
            digest = hashlib.blake2b(salt.encode(), key=caller.digest(), digest_size=SALT_BYTES)
            salt = digest.hexdigest()
        return replace(options, priority=priority, salt=salt, caller=caller.hexdigest())
