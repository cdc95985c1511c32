"""The supervisor behind `manage.py up`, and backup and restore: it runs without importing Django itself."""
