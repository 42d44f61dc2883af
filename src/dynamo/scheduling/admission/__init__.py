"""Whether a request is taken, and when it may go to a worker."""

from dynamo.scheduling.admission.admission import Admission
from dynamo.scheduling.admission.slo import SloLimits

__all__ = ["Admission", "SloLimits"]
