"""Celery tasks of quotas."""

from quotas import tasks_money

__all__ = ["tasks_money"]
