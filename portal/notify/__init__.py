"""Notices to people: in the page, by mail and by signed webhook, through the outbox, once per threshold."""
