"""`gpupool`: the pool from a person's own machine. One file, standard library only, Python ≥ 3.8."""

VERSION = "0.1.0"
