"""What monitoring listens to in the outbox."""

from __future__ import annotations
