"""What may be wrong in a gallery: labels, duplicates, outliers, and test images that are in it too."""

from kedge.audit.audit import audit
from kedge.audit.fixes import Fixes, apply_fixes
from kedge.audit.report import KINDS, Audit, Finding, Kind, audit_page

__all__ = ["KINDS", "Audit", "Finding", "Fixes", "Kind", "apply_fixes", "audit", "audit_page"]
