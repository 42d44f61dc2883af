"""Admission: whether a request is accepted, and when it is sent to a worker."""

from dynamo.scheduling.admission.admission import Admission, SloLimits

__all__ = ["Admission", "SloLimits"]
