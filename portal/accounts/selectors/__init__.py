"""What is read of people and departments."""
