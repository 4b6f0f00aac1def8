"""The peer copy as the keeper's control thread sees it: who is there, what is asked of them, and what came of it.

Nothing here waits: what takes time is done in threads, and answered when it is done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from transomd.tce.memory.tenant import Tenant
from transomd.tce.memory.wire import Line, Message
from transomd.tce.replicate.copies import Copies
from transomd.tce.replicate.holdings import Holder, Step
from transomd.tce.replicate.post import Post
from transomd.tce.replicate.sender import Sender

log = logging.getLogger("transom.tce.keeper")
NOT_LAUNCHED = "no keeper on another node is known: the program was not started by transom"


class Office:
    """Closed until ``open``. ``refusal`` says why so many more bytes cannot be had; ``wake`` the control thread."""

    def __init__(
        self, tenants: Callable[[], Sequence[Tenant]], refusal: Callable[[int], str], wake: Callable[[], None]
    ) -> None:
        self.no_partner = NOT_LAUNCHED
        self.copies = Copies(refusal)
        self._tenants = tenants
        self._wake = wake
        self._post: Post | None = None
        self._sender: Sender | None = None
        self._epoch = -1
        self._answers: deque[tuple[Line, Message]] = deque()

    def open(self, token: str, port: int) -> None:
        """Listen for other keepers of this job. Raises OSError."""
        self._post = Post(token, port, self.holders, self._tenants, self.copies)
        self._sender = Sender(token, self._tenants, self._post.begun)
        self.no_partner = "the launcher has not told of a keeper on another node"

    def holders(self, directory: str) -> list[Holder]:
        """Everything here of one checkpoint directory: first what is the ranks' own, then copies."""
        own = [tenant for tenant in self._tenants() if str(tenant.directory) == directory]
        return [*own, *self.copies.all(directory)]

    def meet(self, message: Message) -> None:
        """Learn from the launcher who is there in this epoch, and who gets our copies. ValueError if it is wrong."""
        if self._post is None or self._sender is None or int(message["epoch"]) < self._epoch:
            return
        self._epoch = int(message["epoch"])
        keepers = {
            str(name): (str(host), int(port), frozenset(int(rank) for rank in ranks))
            for name, (host, port, ranks) in message["keepers"].items()
        }
        partner = str(message["partner"] or "")
        there = keepers.get(partner)
        self._post.keepers = {name: told for name, told in keepers.items() if name != message["me"]}
        self._sender.turn_to((partner, there[:2]) if there else None)
        self.no_partner = "" if there else "no other node of this launch can hold a copy"

    def keep(self, message: Message) -> None:
        """Learn from the launcher which copies to keep, and from which step on to copy. ValueError if it is wrong."""
        steps = frozenset((int(epoch), int(step)) for epoch, step in message["steps"])
        aim = (int(message["aim"][0]), int(message["aim"][1])) if message["aim"] else None
        self.copies.keep(steps, aim)
        if self._sender is not None:
            self._sender.aim_at(aim)

    def ring(self) -> None:
        """There is something new to copy."""
        if self._sender is not None:
            self._sender.ring()

    def ask(self, line: Line, message: Message, key: tuple[str, int], world_size: int) -> None:
        """Search other nodes for steps of a rank (``abroad``), or fetch one (``fetch``); answered when it is done."""
        post = self._post
        if post is None or not post.keepers:
            line.queue({"id": message["id"], "steps": [], "error": self.no_partner or "no other node is known"})
            return
        step = (int(message["epoch"]), int(message["step"])) if message["op"] == "fetch" else None
        work = (post, line, int(message["id"]), key, world_size, step)
        threading.Thread(target=self._work, args=work, daemon=True).start()

    def _work(
        self, post: Post, line: Line, number: int, key: tuple[str, int], world_size: int, step: Step | None
    ) -> None:
        answer: dict[str, Any] = {"id": number, "steps": [], "error": ""}
        try:
            if step is None:
                answer["steps"] = [list(at) for at in post.search(*key, world_size)]
            else:
                post.fetch(*key, world_size, step)
        except Exception as error:  # the program must get an answer
            answer["error"] = str(error)
            log.warning(
                "rank %d finds no copy on other nodes: %s", key[1], error, exc_info=not isinstance(error, OSError)
            )
        self._answers.append((line, answer))
        self._wake()

    def pass_on(self, lines: Collection[Line]) -> None:
        """Put in line what has been done since, for whoever is still there."""
        with contextlib.suppress(IndexError):
            while True:
                line, answer = self._answers.popleft()
                if line in lines:
                    line.queue(answer)

    def status(self) -> Message:
        """For people and for the launcher."""
        sender = self._sender
        return {
            "port": self._post.port if self._post else 0,
            "partner": sender.partner if sender else "",
            "no_partner": self.no_partner,
            "aim": self.copies.aim,
            "keeps": sorted(map(list, self.copies.keeps)),
            "replica_problem": sender.problem if sender else "",
            "copies": [
                {"rank": copy.rank, "directory": copy.directory, "bytes": copy.bytes, "steps": steps_of(copy)}
                for copy in self.copies.all()
            ],
        }


def steps_of(holder: Holder) -> list[list[int]]:
    """Epoch and step of what is held."""
    return [[state.epoch, state.step] for _, _, state in holder.staged()]
