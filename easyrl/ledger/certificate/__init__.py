"""``RUN_DIR/certificate.jsonl``: what each batch was made by and trained on (docs/on_policy.md)."""
