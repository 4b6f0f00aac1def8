"""What can go wrong with Slurm.

::

    SlurmError                operation, cause, next command
    ├── SlurmUnavailable      no answer: controller, munge or network; the truth is unknown
    │   ├── SlurmUnreadable   an answer this version of transom cannot read
    │   └── SubmitAmbiguous   sbatch gave no clear answer: the job may exist; look for its tag before trying again
    ├── SlurmDenied           the caller may not do it
    └── SlurmRejected         Slurm answered no (unknown partition, invalid node, impossible request)
"""

from __future__ import annotations


class SlurmError(Exception):
    """An operation on Slurm failed. ``hint`` is the next command to type."""

    def __init__(self, operation: str, cause: str, *, hint: str = "") -> None:
        super().__init__(f"{operation}: {cause}")
        self.operation = operation
        self.cause = cause
        self.hint = hint


class SlurmUnavailable(SlurmError):
    """No answer in time, or one that says the controller cannot be reached. Proves nothing about jobs or nodes."""


class SlurmUnreadable(SlurmUnavailable):
    """An answer that cannot be read (the message quotes the line). Nothing is guessed, so it proves nothing either."""


class SubmitAmbiguous(SlurmUnavailable):
    """``sbatch`` ended without a clear answer, so the job may have been accepted."""


class SlurmDenied(SlurmError):
    """The caller lacks the right."""


class SlurmRejected(SlurmError):
    """Slurm understood and said no."""
