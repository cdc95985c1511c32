"""What it does, and whether it is well used."""
