"""A program's lease of memory from its node's keeper: the line, what is said over it, whether the memory is held."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from typing import Any

from transomd.tce.memory.link import Link, call, greet
from transomd.tce.memory.wire import Message
from transomd.tce.store import Store

log = logging.getLogger("transom.tce")
AGAIN_S = 15.0
"""How soon a keeper that could not be had is asked for again."""
_WORDS = re.compile(r"[a-z]{4,}")


class Lease:
    """``held``: whether the keeper counts the memory that it gave as this start's. ``reason``: why there is none.

    Not safe for several threads, but for ``pause`` and ``look``. ``call`` and ``ask`` wait for a keeper.
    """

    def __init__(self, store: Store, link: Link | None) -> None:
        self.held = False
        self.reason = ""
        self._source: tuple[str, int] | None = None
        self._store = store
        self._link = link
        self._again_at = 0.0
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one whose lease it is."""
        return os.getpid() != self._pid

    @property
    def connected(self) -> bool:
        """Whether the line is open, as far as is known."""
        return self._link is not None

    def call(self, size: int, brought: tuple[int, ...]) -> tuple[Link, Message, list[int]]:
        """Call a keeper, which is started if need be, and ask it as ``ask`` does; the line is for ``take``.

        Raises OSError, and at once for a while after that.
        """
        if time.monotonic() < self._again_at:
            raise OSError(self.reason)
        self._again_at = time.monotonic() + AGAIN_S
        writer = self._store.writer
        link = call(writer.directory, writer.rank, writer.world_size, start=True)
        assert link is not None, "it is started where there is none"
        try:
            return link, *self._ask(link, size, brought)
        except BaseException:
            link.close()
            raise

    def look(self) -> tuple[Link, Message] | None:
        """Another line to a keeper that is there already, and what it says of this rank; None: there is none.

        Raises OSError.
        """
        writer = self._store.writer
        return greet(writer.directory, writer.rank, writer.world_size, start=False)

    def take(self, link: Link) -> None:
        """Talk over this line from now on."""
        self.hang_up()
        self._link = link

    def ask(self, size: int, brought: tuple[int, ...]) -> tuple[Message, list[int]]:
        """Ask for an arena with slots of ``size`` bytes; ``brought``: one that an earlier keeper gave.

        Raises OSError. See ``granted``.
        """
        assert self._link is not None, "a keeper is called first"
        return self._ask(self._link, size, brought)

    def _ask(self, link: Link, size: int, brought: tuple[int, ...]) -> tuple[Message, list[int]]:
        store = self._store
        told: dict[str, Any] = {"epoch": store.writer.epoch, "token": store.token, "keep": store.keep}
        told |= {"every": store.every.storage, "replica_every": store.every.replica}
        if self._source is not None:
            told["resumed"] = list(self._source)
        return link.ask("arena", brought, bytes=size, **told)

    def granted(self, answer: Message) -> None:
        """Raises OSError if the keeper has answered that there is no memory."""
        if "refused" in answer:
            self._again_at = time.monotonic() + AGAIN_S
            raise OSError(f"no memory for a copy: {answer['refused']}")

    def hold(self) -> None:
        """The memory that was asked for is there."""
        self.held = True
        if self.reason:
            log.warning("checkpoints are copied into memory again")
        self.reason, self._again_at = "", 0.0

    def lack(self, reason: str) -> None:
        """Note why there is no memory, with one warning for one reason, whose numbers may differ each time."""
        if _WORDS.findall(reason) != _WORDS.findall(self.reason):
            log.warning("%s; save() writes to storage and waits for it until that has changed", reason)
        self.reason = reason

    def resumed(self, folder: str, step: int) -> None:
        """What was loaded from ``folder`` stays, and storage is to get ``step`` (-1: it has it). Raises OSError.

        A keeper that is asked for an arena hears of it with that: before anything can be staged there.
        """
        self._source = (folder, step)
        self.tell("resumed", folder=folder, step=step)

    def tell(self, op: str, **details: object) -> None:
        """Send word, if the line is open. Raises OSError if that is lost."""
        if self._link is not None:
            try:
                self._link.tell(op, **details)
            except OSError as error:
                self._lost(error)
                raise

    def news(self) -> list[Message]:
        """What the keeper has sent since it was last asked."""
        if self._link is None or self.forked:
            return []
        link = self._link
        news: list[Message] = []
        lost: OSError | None = None
        try:
            link.listen()
        except OSError as error:
            lost = error
        while link.news:
            news.append(link.news.popleft())
        if any(told["t"] == "lost" for told in news):
            self.held = False
        if lost is not None:
            self._lost(lost)
        return news

    def pause(self, seconds: float) -> None:
        """Wait for word from the keeper, at most so long."""
        link = self._link
        if link is None:
            time.sleep(seconds)
        else:
            with contextlib.suppress(ValueError):  # another thread has hung up meanwhile
                link.wait(seconds)

    def leave(self) -> None:
        """Say that nothing more is staged: the newest is to be stored, and the memory may be given back then.

        The keeper goes on telling what becomes of it. Raises OSError.
        """
        if self.held:
            self.tell("bye")

    def hang_up(self) -> None:
        """Close the line without a word: the memory is to be asked for again, as another keeper may come."""
        if self._link is not None:
            self._link.close()
        self._link, self.held = None, False

    def _lost(self, error: OSError) -> None:
        """The keeper is gone: what it gave stays mapped here, and the next keeper gets it."""
        if self._link is not None:
            log.warning("the keeper was lost (%s); what is in memory stays there", error)
        self.hang_up()
        self.reason = "the keeper was lost"
