"""Prometheus metrics of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "kedge_requests", "Requests that were answered.", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "kedge_request_seconds", "From a request to its answer.", ("route",), buckets=_SECONDS, registry=registry
        )
        self.searched = Histogram(
            "kedge_search_seconds",
            "The search alone, without the encoder.",
            ("method",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch = Histogram(
            "kedge_encoder_batch",
            "Images that went through the encoder together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.in_flight = Gauge("kedge_requests_inside", "Requests in flight.", registry=registry)
        self.refused = Counter("kedge_requests_refused", "Requests answered with 429.", registry=registry)
        self.connections = Gauge("kedge_connections", "Open connections.", registry=registry)
        self.dropped = Counter(
            "kedge_connections_dropped", "Connections that were too slow, or too many.", registry=registry
        )
        self.upload_bytes = Gauge("kedge_upload_bytes", "Bytes of uploads in flight.", registry=registry)
        self.items = Gauge("kedge_gallery_items", "Items in the gallery.", registry=registry)
        self.version = Gauge("kedge_gallery_version", "The version of the gallery.", registry=registry)

    def text(self) -> bytes:
        """All of them in the Prometheus text format."""
        return generate_latest(self.registry)
