"""Metrics over OTLP, off unless configured: `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`.

As for traces, nothing of the SDK is imported while it is off, and each function then costs one check for None. What is
recorded is added up in memory and sent by a thread of its own: a collector that is away costs nobody anything.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

log = logging.getLogger("headrace.tracing")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS: Final = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576)
Attributes = Mapping[str, str | int | bool]


class _Provider(Protocol):
    def shutdown(self, timeout_millis: float = 30_000) -> None: ...


_meter: Meter | None = None
_provider: _Provider | None = None
_instruments: dict[str, Any] = {}


def configured(environ: Mapping[str, str] | None = None) -> bool:
    """True if the environment names a receiver and does not switch metrics off."""
    env = os.environ if environ is None else environ
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if env.get("OTEL_METRICS_EXPORTER", "otlp").strip().lower() in ("none", ""):
        return False
    return any(env.get(name, "").strip() for name in _ENDPOINTS)


def setup_metrics(service: str) -> None:
    """Start sending metrics of this process as `headrace-<service>`, if the environment asks for it."""
    global _meter, _provider
    if _meter is not None or not configured():
        return
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    from headrace.mesh.tracing import resource_of

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    # No exit handler: the SDK's waits for a receiver that is down. `shutdown_metrics` has a bound.
    provider = MeterProvider([reader], resource=resource_of(service), shutdown_on_exit=False)
    _provider, _meter = provider, provider.get_meter("headrace")


def shutdown_metrics(timeout_s: float = 5.0) -> None:
    """Send what there is and stop; give up after `timeout_s`."""
    global _meter, _provider
    provider, _provider, _meter = _provider, None, None
    _instruments.clear()
    if provider is None:
        return
    flush = threading.Thread(target=provider.shutdown, name="headrace-metrics-flush", daemon=True)
    flush.start()
    flush.join(timeout_s)
    if flush.is_alive():
        log.warning("metrics not sent within %.1f s: given up", timeout_s)


def enabled() -> bool:
    """True between `setup_metrics` and `shutdown_metrics`, if a receiver is configured."""
    return _meter is not None


def count(name: str, attributes: Attributes, *, unit: str, n: int = 1) -> None:
    """Add to a counter."""
    if _meter is None:
        return
    instrument = _instruments.get(name)
    if instrument is None:
        instrument = _instruments[name] = _meter.create_counter(name, unit)
    instrument.add(n, attributes)


def record(
    name: str, value: float, attributes: Attributes, *, unit: str, buckets: tuple[float, ...] = SECONDS
) -> None:
    """Add to a histogram."""
    if _meter is None:
        return
    instrument = _instruments.get(name)
    if instrument is None:
        instrument = _instruments[name] = _meter.create_histogram(
            name, unit, explicit_bucket_boundaries_advisory=buckets
        )
    instrument.record(value, attributes)


def observe(
    name: str, look: Callable[[], Iterable[tuple[float, Attributes]]], *, unit: str, description: str
) -> None:
    """Ask `look` for the values of a gauge whenever metrics are sent; it is called in another thread."""
    if _meter is None:
        return

    def values(_options: CallbackOptions) -> list[Observation]:
        return [Observation(value, attributes) for value, attributes in look()]

    _instruments[name] = _meter.create_observable_gauge(name, [values], unit, description)
