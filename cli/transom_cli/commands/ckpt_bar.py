"""A progress bar over bytes, on a terminal only, and only once the work has taken two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from transom_cli.progress import AFTER_S

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
            self._shown[0].update(self._shown[1], completed=self._done)

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown[0].stop()

    def _show(self) -> tuple[Progress, TaskID]:
        # Only now: most runs end before there is anything to show, and rich takes its time to load.
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        console = Console(file=self._stream)
        bar = progress.Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        bar.start()
        return bar, bar.add_task(self._what, total=self._total)
