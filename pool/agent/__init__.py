"""The node agent: the one file that an installation serves to its GPU nodes.

Everything below this package runs on the node with the standard library and ``pynvml`` alone (``psutil``
where it is present), on Python 3.8 or newer, and never imports Django or another room.
"""

VERSION = "0.1.0"
PROTOCOL = 1
