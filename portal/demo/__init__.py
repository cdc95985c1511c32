"""The demonstration: an invented organisation on a simulated fleet, with 90 days of history.

Wiring level: it calls the services of every room, and no room knows of it.
"""
