"""The executor of plain Linux nodes: orders go to the node's agent as rows and over its WebSocket."""
