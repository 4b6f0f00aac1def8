"""Several connections between two keepers: words go over the first one, the chunks of a large step over all.

One TCP stream carries less than the port of a node, whatever the window: one processor at each end moves its bytes.
The side that called opens the others, and each names the first one by what both sides made up when they met there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transomd.tce.replicate.peer import CHUNK, Peer

log = logging.getLogger("transom.tce.keeper")

STREAMS = 4
WIDE = 2 * STREAMS * CHUNK
"""Bytes from which on a step is worth more than one stream."""
AGAIN_S = 300.0
"""How soon streams that could not be opened are tried again."""
YES = {"t": "yes"}
Found = TypeVar("Found")


class Streams:
    """One end of the connections between two keepers. ``first``: the one for words.

    ``widened``: whether others were opened, so that one alone may do where these fail.
    """

    def __init__(self, first: Peer) -> None:
        self.first = first
        self.widened = False
        self._all = [first]
        self._leads = False
        self._again_at = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def lead(self) -> None:
        """The side that called: have the other side know the first one, before it is asked for anything else."""
        if self.first.wide and not self._leads:
            _agree(self.first, {"t": "lead"})
            self._leads = True

    def widen(self, call: Callable[[], Peer]) -> None:
        """The side that called, after ``lead``: open the other streams, unless they are there.

        What cannot be opened is done without, which is told once, and tried again after a while. Raises OSError, and
        hangs up, where the other side may count on a stream of which this one does not know.
        """
        while len(self._all) < STREAMS and time.monotonic() >= self._again_at:
            try:
                side = self._side(call)
            except OSError as error:
                told = log.debug if self._again_at else log.warning
                told("only %d of %d streams to %s: %s", len(self._all), STREAMS, self.first.name, error)
                self._again_at = time.monotonic() + AGAIN_S
            else:
                self._add(side)

    def _side(self, call: Callable[[], Peer]) -> Peer:
        if not self._leads:
            raise ConnectionError("its keeper is of an earlier version")
        return call()

    def _add(self, side: Peer) -> None:
        self.widened = True
        self._all.append(side)
        try:
            _agree(side, {"t": "join", "key": self.first.key})
        except BaseException:
            self.close()
            raise

    def join(self, side: Peer) -> None:
        """The side that was called: add a stream, and wait until all of them are closed. Raises OSError."""
        with self._lock:
            if self._closed.is_set() or len(self._all) >= STREAMS:
                raise ConnectionError("a stream joins no others")
            self._all.append(side)
            side.send(YES)  # who hears it counts on the stream
        self._closed.wait()

    def each(self, work: Callable[[Peer], Found]) -> list[Found]:
        """What ``work`` gives for each stream, at the same time. Where one fails all are closed; raises its error."""
        failed: list[BaseException] = []

        def one(peer: Peer) -> Found:
            try:
                return work(peer)
            except BaseException as error:
                failed.append(error)
                self.close()
                raise

        with ThreadPoolExecutor(len(self._all)) as pool:
            begun = [pool.submit(one, peer) for peer in self._all]
        if failed:
            raise failed[0]
        return [each.result() for each in begun]

    def give_way_to(self, wanted: Callable[[], bool]) -> None:
        """What is asked while the other side lets us wait: whether to break off (GaveWay)."""
        for peer in self._all:
            peer.wanted = wanted

    def close(self) -> None:
        """Hang up on all streams."""
        with self._lock:
            self._closed.set()
            for peer in self._all:
                peer.close()


def _agree(peer: Peer, message: dict[str, str]) -> None:
    peer.send(message)
    if peer.receive() != YES:
        raise ConnectionError("the other side takes no further streams")
