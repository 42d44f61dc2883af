"""The names of the metrics that programs annotate with those of NVIDIA Dynamo's bindings."""

from dynamo.runtime.compatibility.metrics import ProgramMetric as Counter

Gauge = Histogram = IntCounter = IntGauge = Counter
CounterVec = GaugeVec = HistogramVec = IntCounterVec = IntGaugeVec = Counter
