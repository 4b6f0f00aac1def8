"""The command ``transomd``: says what to install where only the plain package is, instead of a traceback."""

from __future__ import annotations

import sys

from transomd.words import ExitCode


def main() -> int:
    """Run the daemon; see :mod:`transomd.daemon`."""
    try:
        from transomd.daemon import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("transomd", "transom_slurm", "transom_sql"):
            raise
        print(
            f"transomd: starting the daemon: {error.name} is not installed\n  next: pip install 'transom[daemon]'",
            file=sys.stderr,
        )
        return int(ExitCode.ERROR)
    return run()
