"""Prometheus metrics of a server."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="kedge", registry=self.registry)
        gauge = partial(Gauge, namespace="kedge", registry=self.registry)
        histogram = partial(Histogram, namespace="kedge", registry=self.registry)
        self.requests = counter("requests", "Requests that were answered.", ["method", "route", "status"])
        self.seconds = histogram("request_seconds", "From a request to its answer.", ["route"], buckets=_SECONDS)
        self.searched = histogram(
            "search_seconds", "The search alone, without the encoder.", ["method"], buckets=_SECONDS
        )
        self.batch = histogram("encoder_batch", "Images that went through the encoder together.", buckets=_SIZES)
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
