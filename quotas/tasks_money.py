"""Celery tasks of the ledger (imported by quotas.tasks)."""
