"""The server's metrics as Ray's metrics. Every node exports those of its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from ray.serve import metrics

from topw_deploy.serve.metrics import COUNTERS, GAUGES, MODEL, Metrics
from topw_deploy.serve.service import Service

REPORT_INTERVAL = 5.0
"""Seconds between reports of the engines' counts."""


class RayMetrics(Metrics):
    """The metrics of each request and token, as histograms and counters of Ray.

    Names have the prefix `topw_`, because names in Ray cannot have a colon. Ray adds labels for deployment, replica
    and application.
    """

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Any:
        return _LabelledMetric(metrics.Histogram(f"topw_{name}", text, list(map(float, buckets)), (MODEL,)), (MODEL,))

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        names = (MODEL, *labels)
        return _LabelledMetric(metrics.Counter(f"topw_{name}", text, names), names)


class _LabelledMetric:
    """A metric of Ray with the methods of Prometheus' client: `labels(value, ...)`, then `observe` or `inc`.

    names, values: of the labels.
    """

    def __init__(self, metric: Any, names: tuple[str, ...], values: tuple[str, ...] = ()) -> None:
        self._metric, self._names, self._values = metric, names, values

    def labels(self, *values: object) -> _LabelledMetric:
        return _LabelledMetric(self._metric, self._names, tuple(map(str, values)))

    def observe(self, value: float) -> None:
        self._metric.observe(float(value), tags=self._tags())

    def inc(self, amount: float = 1) -> None:
        if amount > 0:  # Ray refuses 0
            self._metric.inc(float(amount), tags=self._tags())

    def _tags(self) -> dict[str, str]:
        """The labels with their values. A new dictionary for each call, because Ray adds its own labels to it."""
        return dict(zip(self._names, self._values, strict=True))


async def report_engines(service: Service) -> None:
    """Send the engines' counts to Ray every REPORT_INTERVAL seconds, until the task is cancelled."""
    gauges = [(metrics.Gauge(f"topw_{name}", text, (MODEL,)), read) for name, text, read in GAUGES]
    counters = [(metrics.Counter(f"topw_{name}", text, (MODEL,)), read) for name, text, read in COUNTERS]
    sent: dict[tuple[str, int], float] = {}  # (model, counter) -> its last value
    while True:
        for served in service.served():
            stats, tags = served.engine.stats(), {MODEL: served.name}
            for gauge, read in gauges:
                gauge.set(read(stats), tags=tags)
            for index, (counter, read) in enumerate(counters):
                now = read(stats)
                gained = now - sent.get((served.name, index), 0)
                sent[served.name, index] = now
                if gained > 0:
                    counter.inc(gained, tags=tags)
        await asyncio.sleep(REPORT_INTERVAL)
