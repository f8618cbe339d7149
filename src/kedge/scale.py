"""The former name of `kedge.ray`, for one release."""

import warnings

from kedge.ray import build_index, index_with_ray, search_with_ray

__all__ = ["build_index", "index_with_ray", "search_with_ray"]

warnings.warn("kedge.scale is now called kedge.ray.", DeprecationWarning, stacklevel=2)
