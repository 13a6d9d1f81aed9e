"""What the router measured, and what it looked up, as Prometheus reads it.

Prometheus' own client underneath; which metrics there are says `core.telemetry`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from core.telemetry import TABLE, Entry, Kind, Sample

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

# Untyped in the library.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Telemetry:
    """The measured metrics of one process; one per process, thread-safe.

    Invariant: what is measured without labels is told from the start, as zero.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, entry: Entry) -> Counter:
        """The counter of this entry; called once for each."""
        assert entry in TABLE and entry.kind is Kind.COUNTER
        return Counter(entry.name, entry.meaning, entry.labels, registry=self._registry)

    def histogram(self, entry: Entry) -> Histogram:
        """The histogram of this entry; called once for each."""
        assert entry in TABLE and entry.kind is Kind.HISTOGRAM
        buckets = entry.buckets
        return Histogram(
            entry.name, entry.meaning, entry.labels, buckets=buckets, registry=self._registry
        )

    def exposition(self, samples: Iterable[Sample]) -> bytes:
        """Everything measured, and these facts, in Prometheus' text format."""
        both = CollectorRegistry(auto_describe=False)
        both.register(_Collected(lambda: [*self._registry.collect(), *_families(samples)]))
        return prometheus_client.generate_latest(both)


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    read: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        return self.read()


def _families(samples: Iterable[Sample]) -> Iterator[Metric]:
    by_entry: dict[Entry, list[Sample]] = {}
    for sample in samples:
        by_entry.setdefault(sample.entry, []).append(sample)
    for entry, found in by_entry.items():
        if entry.kind is Kind.HISTOGRAM:
            yield _histogram_family(entry, found)
            continue
        kind = CounterMetricFamily if entry.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(entry.name, entry.meaning, labels=entry.labels)
        for sample in found:
            family.add_metric(sample.labels, sample.value)
        yield family


def _histogram_family(entry: Entry, samples: list[Sample]) -> Metric:
    family = HistogramMetricFamily(entry.name, entry.meaning, labels=entry.labels)
    bounds = [*map(str, entry.buckets), "+Inf"]
    for sample in samples:
        up_to = zip(bounds, accumulate(sample.counts), strict=True)
        family.add_metric(sample.labels, buckets=[*up_to], sum_value=sample.value)
    return family
