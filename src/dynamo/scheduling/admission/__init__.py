"""Admission: whether a request is accepted, and when it is sent to a worker."""

from dynamo.scheduling.admission.admission import Admission
from dynamo.scheduling.admission.worker_starts import WorkerStarts

__all__ = ["Admission", "WorkerStarts"]
