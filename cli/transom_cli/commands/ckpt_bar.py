"""A progress bar over bytes, on a terminal only, and only once the work has taken two seconds."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from transom_cli.progress import AFTER_S, EVERY_S, beside

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ByteBar:
    """Shows on standard error how many of ``total`` bytes are done; the bar goes when the work is done."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = clock()
        self._done = 0
        self._shown: tuple[Progress, TaskID] | None = None

    def advance(self, count: int) -> None:
        """Note that ``count`` more bytes are done."""
        self._done += count
        if self._shown is None and self._stream.isatty() and self._clock() - self._began > AFTER_S:
            self._shown = self._show()
        if self._shown is not None:
            self._shown[0].update(self._shown[1], completed=min(self._done, self._total))

    def turn_to(self, what: str) -> None:
        """Say of the bytes that follow what is done with them."""
        self._what = what
        if self._shown is not None:
            self._shown[0].update(self._shown[1], description=what)

    def hide(self) -> None:
        """Take the bar away, so that a line can be printed; it comes back with the next bytes."""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()

    def _show(self) -> tuple[Progress, TaskID]:
        # Only now: most runs end before there is anything to show, and rich takes its time to load.
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(None),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        console = Console(file=self._stream)
        bar = progress.Progress(
            *columns, console=console, transient=True, expand=True, redirect_stdout=False, redirect_stderr=False
        )
        bar.start()
        return bar, bar.add_task(self._what, total=self._total, completed=min(self._done, self._total))


@contextlib.contextmanager
def writing(what: str, total: int) -> Iterator[None]:
    """Show a bar over ``total`` bytes that this process writes meanwhile, as the kernel counts them."""
    if not sys.stderr.isatty():
        yield
        return
    with ByteBar(what, total) as bar, beside(lambda done: _watch(bar, done)):
        yield


def _watch(bar: ByteBar, done: threading.Event) -> None:
    before = _written()
    while not done.wait(EVERY_S):
        now = _written()
        bar.advance(now - before)
        before = now


def _written() -> int:
    """Bytes that this process has written so far; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())
        return int(found[1]) if found else 0
    return 0
