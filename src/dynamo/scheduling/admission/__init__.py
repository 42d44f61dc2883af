"""Whether a request is taken, and when it may go to a worker."""

from dynamo.scheduling.admission.admission import Admission
from dynamo.scheduling.admission.promise import Promise

__all__ = ["Admission", "Promise"]
