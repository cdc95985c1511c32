"""Slurm by slurmrestd."""

from __future__ import annotations

from pool.executors.slurm.cli import CommandLine
from pool.executors.slurm.settings import SlurmSettings


class Rest(CommandLine):
    def __init__(self, settings: SlurmSettings, token: str | None, commands: CommandLine) -> None:
        super().__init__(settings)
