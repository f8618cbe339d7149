"""What may be wrong in a gallery: labels, duplicates, outliers, and test pictures that stand in it too."""

from kedge.audit.audit import audit
from kedge.audit.findings import KINDS, Audit, Finding, Kind
from kedge.audit.page import audit_page

__all__ = ["KINDS", "Audit", "Finding", "Kind", "audit", "audit_page"]
