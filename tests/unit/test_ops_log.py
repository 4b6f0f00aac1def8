"""The log: one line a record, with what it is about, and never in the way of whoever logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import Queue
from typing import TextIO

import pytest

from transomd.log import Inbox, Json, Text, Writer, about, formatter, in_journal

LOST = re.compile(r"(\d+) records were lost")
SLOW = """
import logging, sys, time
from transomd.log import set_up
inbox = set_up()
log = logging.getLogger("transom.test")
began = time.monotonic()
for number in range(30_000):
    log.info("record %d %s", number, "x" * 200)
took = time.monotonic() - began
print(f"{took:.3f} {inbox.lost}", flush=True)
"""


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("transom.test-of-the-log")
    made.propagate, made.level = False, logging.INFO
    yield made
    made.handlers.clear()


def attach(logger: logging.Logger, target: TextIO, form: logging.Formatter, size: int = 100) -> Inbox:
    inbox = Inbox(Queue(size), form)
    writer = Writer(inbox, target)
    writer.start()
    logger.addHandler(inbox)
    return inbox


def drained(read: int, inbox: Inbox) -> list[str]:
    """Read until all that was queued is written."""
    os.set_blocking(read, False)
    got = b""
    while inbox.queue.unfinished_tasks or select.select([read], [], [], 0.1)[0]:
        with contextlib.suppress(BlockingIOError):
            got += os.read(read, 65536)
    return got.decode().splitlines()


def lines(read: int, count: int) -> list[str]:
    got = b""
    while got.count(b"\n") < count:
        got += os.read(read, 65536)
    return got.decode().splitlines()


def test_json_says_what_it_is_about(logger: logging.Logger) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as target:
        attach(logger, target, Json())
        with about(job=12, attempt=2, node=None):
            logger.info("drained %s\nand more", "n1")
            with about(node="n1"):
                try:
                    raise ValueError("no")
                except ValueError:
                    logger.exception("it failed")
        logger.warning("about nothing")
        first, second, third = (json.loads(line) for line in lines(read, 3))
    os.close(read)
    assert first["message"] == "drained n1\nand more"
    assert (first["job"], first["attempt"], first["level"]) == (12, 2, "info")
    assert "node" not in first
    assert second["node"] == "n1"
    assert "ValueError: no" in second["error"]
    assert "job" not in third
    assert first["at"].endswith("Z")


async def test_tasks_keep_their_own_context(logger: logging.Logger) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as target:
        attach(logger, target, Json())

        async def one(job: int) -> None:
            with about(job=job):
                await asyncio.sleep(0)
                logger.info("job %d", job)

        await asyncio.gather(*(one(job) for job in range(5)))
        told = [json.loads(line) for line in lines(read, 5)]
    os.close(read)
    assert all(record["message"] == f"job {record['job']}" for record in told)


def test_a_target_that_takes_nothing_stalls_nobody_and_what_was_lost_is_said(logger: logging.Logger) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as target:
        inbox = attach(logger, target, Text(), size=50)
        began = time.monotonic()
        for number in range(2000):
            logger.info("record %d %s", number, "x" * 500)
        assert time.monotonic() - began < 20
        assert inbox.lost > 1000
        told = drained(read, inbox)
    os.close(read)
    assert sum("xxx" in line for line in told) == 2000 - inbox.lost
    said = [int(found.group(1)) for line in told if (found := LOST.search(line))]
    assert sum(said) == inbox.lost


def test_a_process_whose_log_nobody_reads_ends_in_time() -> None:
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    took, lost = process.stdout.readline().split()
    process.wait(timeout=60)
    assert float(took) < 20
    assert int(lost) > 0
    assert time.monotonic() - began < 60
    process.stdout.close()
    process.stderr.close()


def test_a_target_that_is_gone_stops_nothing(logger: logging.Logger) -> None:
    read, write = os.pipe()
    target = os.fdopen(write, "w")
    inbox = attach(logger, target, Text())
    os.close(read)
    logger.info("nobody hears this")
    inbox.queue.join()
    logger.info("nor this")
    inbox.queue.join()
    assert any(thread.name == "log" and thread.is_alive() for thread in threading.enumerate())
    with contextlib.suppress(BrokenPipeError):
        target.close()


def test_the_journal_is_known_by_its_device_and_inode() -> None:
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as target:
        found = os.fstat(write)
        assert in_journal(target, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not in_journal(target, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"}), "a child of a service"
        assert not in_journal(target, {})
    assert not in_journal(target, {"JOURNAL_STREAM": "1:1"}), "closed"


@pytest.mark.parametrize(("level", "mark"), [("DEBUG", 7), ("INFO", 6), ("WARNING", 4), ("ERROR", 3), ("CRITICAL", 2)])
def test_each_line_in_the_journal_has_its_priority_and_no_second_time(level: str, mark: int) -> None:
    record = logging.LogRecord("transom.x", logging.getLevelName(level), "", 0, "one\n  %s", ("two",), None)
    assert formatter("text", journal=True).format(record) == f"<{mark}>{level:<7} transom.x: one\n<{mark}>  two"
    assert re.match(r"\d{4}-", formatter("text", journal=False).format(record))
    told = formatter("json", journal=True).format(record)
    assert told.startswith(f"<{mark}>{{")
    assert json.loads(told[3:])["message"] == "one\n  two"


def test_a_daemon_finds_out_by_itself_that_it_writes_to_the_journal() -> None:
    program = "import logging; from transomd.log import set_up; set_up(); logging.getLogger('transom.x').warning('so')"
    read, write = os.pipe()
    found = os.fstat(write)
    with os.fdopen(read) as told:
        env = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        subprocess.run([sys.executable, "-c", program], stderr=write, env=env, check=True, timeout=60)
        os.close(write)
        assert told.read() == "<4>WARNING transom.x: so\n"
