"""``RUN_DIR/certificate.jsonl``: what each batch was made by and trained on (docs/on_policy.md)."""

from easyrl.ledger.certificate.errors import CertificateError
from easyrl.ledger.certificate.records import AttemptRecord, BatchRecord, RunRecord
from easyrl.ledger.certificate.writer import Certificate

__all__ = [
    "BatchRecord",
    "Certificate",
    "CertificateError",
    "AttemptRecord",
    "RunRecord",
]
