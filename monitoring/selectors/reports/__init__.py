"""Reports: one module per kind, all made of the sums per local day, the kept ledger sums, and the pool's tables."""
