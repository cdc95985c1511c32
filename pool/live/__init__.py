"""The socket to node agents."""
