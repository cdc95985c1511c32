"""What can go wrong before an installation runs, told in one line each."""


class UpError(Exception):
    """A reason why the command cannot go on; its text is one complete line for a person. `exit_code` is never
    0."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
