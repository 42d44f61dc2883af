"""The names of a chat's fields in the request of another API."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynamo.core.errors import DynamoError


class FieldNames:
    """Renames the fields in errors that leave its `with` block.

    `names()` returns the client's paths of values by those of a chat, e.g. "input[0]" by
    "messages[1]". It also covers what such a value contains, and is called for errors only.
    """

    __slots__ = ("_names",)

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self._names = names

    def __enter__(self) -> None:
        """Begin to rename."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DynamoError) and error.param:
            error.rename_fields(self._rename)

    def _rename(self, field: str) -> str:
        names = self._names()
        outer = field
        while outer and outer not in names:
            outer = outer[: max(outer.rfind("."), outer.rfind("["), 0)]
        return names[outer] + field[len(outer) :] if outer else field


OWN_NAMES = FieldNames(dict)
"""The names of a chat itself."""
