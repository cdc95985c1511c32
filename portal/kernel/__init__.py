"""Ground floor of the installation: errors, clock, units, ids, locks. Imports nothing else of ours."""
