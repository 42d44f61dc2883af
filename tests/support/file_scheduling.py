"""Give whole files to the processes of pytest-xdist, slow ones first, also after a process has died.

Whole deployments mostly wait, and other tests mostly compute. Files of the first kind begin the run,
so that no process ends with a long one. Every third process begins with files of the second kind,
to use the cores while the others wait.

xdist's own scheduler (3.8) then stops for ever: it hands out the finished files of the dead process as
empty units. A process that gets only those waits, since it begins its last test when it has the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

SLOW = tuple(
    f"tests/{folder}/"
    for folder in ("acceptance", "attacks", "faults", "integration", "simulation", "unit/operator")
)
SPLIT = frozenset({"tests/acceptance/test_documents.py"})
"""Files of several minutes whose tests share nothing. Each test is given to a process alone."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler of `--dist loadfile`; None, for xdist's own, with another `--dist`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return nodeid if path in SPLIT else path

        def _assign_work_unit(self, node: Any) -> None:
            slow_first = self.nodes.index(node) % 3 < 2

            def rank(unit: str) -> tuple[bool, int]:
                return unit.startswith(SLOW) != slow_first, -len(self.workqueue[unit])

            self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
            super()._assign_work_unit(node)

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
