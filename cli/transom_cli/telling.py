"""Sentences on a terminal: broken between words, and never within a command that may be copied."""

from __future__ import annotations

import shutil
import sys

from transom_cli.text import plain, width, wrapped


def say(text: object, *, indent: str = "") -> None:
    """Print one sentence on standard output."""
    print("\n".join(wrapped(plain(text), width(), indent=indent, whole=True)), flush=True)


def tell(text: object, *, indent: str = "") -> None:
    """Print one sentence on standard error."""
    print("\n".join(wrapped(plain(text), columns(), indent=indent, whole=True)), file=sys.stderr)


def columns() -> int:
    """Return the columns of the terminal that standard error is; 0 where it is none."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stderr.isatty() else 0
