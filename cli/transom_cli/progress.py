"""A line on the terminal that says that something still goes on, once it takes longer than two seconds."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

from transom_cli.text import clip, plain

AFTER_S = 2.0
EVERY_S = 0.5


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say ``what`` and for how long, on standard error and only on a terminal; the line goes when the work is done."""
    if not sys.stderr.isatty():
        yield
        return
    with beside(lambda done: _tell(what, done)):
        yield


@contextlib.contextmanager
def beside(tell: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``tell`` in a thread meanwhile; it ends once its event is set."""
    done = threading.Event()
    thread = threading.Thread(target=tell, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(what: str, done: threading.Event) -> None:
    began = time.monotonic()
    if done.wait(AFTER_S):
        return
    while not done.wait(EVERY_S):
        took = f": {time.monotonic() - began:.0f} s"
        # A line that wraps could not be taken back.
        room = max(shutil.get_terminal_size().columns - len(took) - 1, 1)
        sys.stderr.write(f"\r\x1b[K{clip(plain(what), room)}{took}")
        sys.stderr.flush()
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()
