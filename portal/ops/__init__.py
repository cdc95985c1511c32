"""What happened and what must still happen: audit trail, outbox, incidents, idempotent writes, locks of beat runs."""
