"""Ray: pictures embedded and indexed over many processes and machines, and searched there."""

from kedge.scale.building import build_index
from kedge.scale.indexing import index_with_ray
from kedge.scale.searching import search_with_ray

__all__ = ["build_index", "index_with_ray", "search_with_ray"]
