"""The names of metrics that programs import to annotate those of `endpoint.metrics`."""

from dynamo.runtime.compatibility import metrics

RuntimeMetrics = metrics.EndpointMetrics
Counter = Gauge = Histogram = IntCounter = IntGauge = metrics.ProgramMetric
CounterVec = GaugeVec = HistogramVec = IntCounterVec = IntGaugeVec = metrics.ProgramMetric
