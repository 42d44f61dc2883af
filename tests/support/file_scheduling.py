"""Give whole files to the processes of pytest-xdist, also after one of them has died.

Its own scheduler (3.8) then stops for ever: it hands out the finished files of the dead process as
empty units. A process that gets only those waits, since it begins its last test when it has the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler of `--dist loadfile`; None, for xdist's own, with another `--dist`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            files = self.assigned_work[node]
            for path in [path for path, tests in files.items() if all(tests.values())]:
                del files[path]
            return super().remove_node(node)

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            while self._waits_for_more(node):
                super()._reschedule(node)

        def _waits_for_more(self, node: Any) -> bool:
            files = self.assigned_work.get(node, {})
            return bool(self.workqueue) and not node.shutting_down and self._pending_of(files) < 2

    return FileScheduling(config, log)
