"""The executor of Slurm clusters: jobs by slurmrestd or by the command line."""
