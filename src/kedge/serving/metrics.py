"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kedge_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"kedge_{name}", text, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"kedge_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests that were answered.", "method", "route", "status")
        self.seconds = histogram("request_seconds", "From a request to its answer.", "route")
        self.searched = histogram("search_seconds", "The search alone, without the encoder.", "method")
        self.batch = histogram(
            "encoder_batch", "Images that went through the encoder together.", buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        self.in_flight = gauge("requests_inside", "Requests in flight.")
        self.refused = counter("requests_refused", "Requests answered with 429.")
        self.connections = gauge("connections", "Open connections.")
        self.dropped = counter("connections_dropped", "Connections that were too slow, or too many.")
        self.upload_bytes = gauge("upload_bytes", "Bytes of uploads in flight.")
        self.items = gauge("gallery_items", "Items in the gallery.")
        self.version = gauge("gallery_version", "The version of the gallery.")

    def text(self) -> bytes:
        """All of them in the Prometheus text format."""
        return generate_latest(self.registry)
