"""The problems of pods that a graph shows in its conditions."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.operations.operator.status import pod_problem

EXIT = {"terminated": {"exitCode": 3, "reason": "Error"}}
BACKOFF = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed pod=a-b(1)"}
NO_IMAGE = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        ({"state": {"waiting": BACKOFF}, "lastState": EXIT},
         "CrashLoopBackOff: main ended with 3 (Error)"),
        ({"state": {"waiting": BACKOFF}}, "CrashLoopBackOff"),
        ({"state": {"waiting": NO_IMAGE}}, 'ImagePullBackOff: Back-off pulling image "x:1"'),
        ({"state": {"waiting": NO_IMAGE}, "lastState": EXIT},
         'ImagePullBackOff: Back-off pulling image "x:1": main ended with 3 (Error)'),
        ({"state": EXIT}, "ended with 3"),
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, ""),
        ({"state": {"running": {}}, "lastState": EXIT}, ""),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_run(container: dict[str, Any], problem: str) -> None:
    pod = {"metadata": {}, "status": {"containerStatuses": [{"name": "main", **container}]}}
    assert pod_problem(pod) == problem
