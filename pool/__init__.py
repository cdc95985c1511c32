"""What there is, and who has it now."""
