"""Ray: images embedded and indexed over many processes and machines, and searched there."""

from kedge.ray.index import index_with_ray
from kedge.ray.lance_index import build_index, search_with_ray

__all__ = ["build_index", "index_with_ray", "search_with_ray"]
