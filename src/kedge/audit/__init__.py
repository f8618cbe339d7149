"""What may be wrong in a gallery: labels, duplicates, outliers, and test images that are in it too."""

from kedge.audit.audit import audit
from kedge.audit.fixes import Fixes, apply_fixes
from kedge.audit.page import audit_page
from kedge.audit.report import KINDS, Audit, Finding, Kind

__all__ = ["KINDS", "Audit", "Finding", "Fixes", "Kind", "apply_fixes", "audit", "audit_page"]
