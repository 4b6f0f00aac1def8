"""Logging of the daemon: one record a line on standard error, written by a thread of its own.

Whoever logs only puts the record into a bounded queue: a slow, hung or full target (a pipe that nobody reads, a disk
without space) never stalls the loop. What did not fit is counted, and said as soon as something can be written again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from queue import Full, Queue
from typing import TextIO

QUEUE = 10_000
"""Records that wait for the writer at most."""
GOODBYE_S = 2.0
"""How long the end of the process waits for what is still to be written."""
FORMATS = ("text", "json")
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Levels, from the highest, with syslog's numbers for them."""

_context: ContextVar[Mapping[str, object]] = ContextVar("transom-log-context", default={})  # noqa: B039 - never changed


@contextlib.contextmanager
def about(**fields: object) -> Iterator[None]:
    """Give the records within these fields (``job``, ``attempt``, ``node``, ``intent``); None adds nothing."""
    token = _context.set({**_context.get(), **{key: value for key, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _context.reset(token)


class Text(logging.Formatter):
    """Time (unless what takes the lines keeps it), level, logger and message, for people."""

    def __init__(self, *, timed: bool = True) -> None:
        super().__init__(f"{'%(asctime)s ' if timed else ''}%(levelname)-7s %(name)s: %(message)s")


class Json(logging.Formatter):
    """A JSON object a line: ``at`` (RFC 3339, UTC), ``level``, ``logger``, what it is about, ``message``, ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "at": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "about", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class Journal(logging.Formatter):
    """Another form's lines, each begun by its priority as journald takes it off again (sd-daemon(3))."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines; journald makes a record of its own of each."""
        mark = f"<{next((number for level, number in PRIORITIES if record.levelno >= level), 7)}>"
        return mark + self._form.format(record).replace("\n", f"\n{mark}")


def in_journal(target: TextIO, env: Mapping[str, str] = os.environ) -> bool:
    """Whether ``target`` is what systemd connected to the journal (``$JOURNAL_STREAM``, systemd.exec(5))."""
    try:
        found = os.fstat(target.fileno())
    except (OSError, ValueError):
        return False
    return env.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def formatter(form: str, *, journal: bool) -> logging.Formatter:
    """Return what makes the lines of ``form``, one of :data:`FORMATS`."""
    made = Json() if form == "json" else Text(timed=not journal)
    return Journal(made) if journal else made


class Inbox(logging.handlers.QueueHandler):
    """Puts records into the queue, with their context; counts those that do not fit."""

    queue: Queue[logging.LogRecord]

    def __init__(self, records: Queue[logging.LogRecord], formatter: logging.Formatter) -> None:
        super().__init__(records)
        self.lost = 0
        self.setFormatter(formatter)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Make the line here: its arguments may change afterwards."""
        record.about = dict(_context.get())
        record.line = self.format(record)
        record.exc_info, record.args = None, ()
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as lost."""
        try:
            self.queue.put_nowait(record)
        except Full:
            self.lost += 1


class Writer(threading.Thread):
    """Writes what is queued. It alone waits for the target."""

    def __init__(self, handler: Inbox, target: TextIO) -> None:
        super().__init__(name="log", daemon=True)
        self._handler = handler
        self._target = target
        self._told = 0

    def run(self) -> None:
        """Write until the process ends."""
        while True:
            record = self._handler.queue.get()
            self._write(getattr(record, "line", ""))
            self._handler.queue.task_done()

    def _write(self, line: str) -> None:
        missing = self._handler.lost - self._told
        if missing:
            self._told += missing
            said = f"{missing} records were lost: what takes the log is slow, or stood still"
            lost = logging.LogRecord("transom.log", logging.WARNING, "", 0, said, (), None)
            line = self._handler.format(lost) + "\n" + line
        data = (line + "\n").encode(errors="backslashreplace")
        with contextlib.suppress(OSError, ValueError):
            # Not through the target's buffer: who is stuck in it holds its lock, and Python 3.13 ends only with that.
            while data:
                data = data[os.write(self._target.fileno(), data) :]

    def say_goodbye(self) -> None:
        """Wait until all is written, but not for ever."""
        end = time.monotonic() + GOODBYE_S
        while self._handler.queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)


def set_up(level: str = "INFO", form: str = "text", target: TextIO | None = None) -> Inbox:
    """Send records of ``level`` and above to standard error, as ``text`` or ``json``; libraries' from WARNING on.

    Where that is the journal, lines bear their priority, and text leaves the time to it.
    """
    target = target or sys.stderr
    handler = Inbox(Queue(QUEUE), formatter(form, journal=in_journal(target)))
    writer = Writer(handler, target)
    writer.start()
    atexit.register(writer.say_goodbye)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("transom").setLevel(level)
    logging.getLogger("asyncssh").setLevel(logging.ERROR)
    return handler
