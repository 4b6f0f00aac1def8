"""A keeper's end of the peer copy: takes copies of other nodes' ranks, and hands out what it holds.

Threads of its own: one that listens, one for each connection. The keeper's control thread never waits for any of them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transomd.tce.image import digest_file
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Place, images
from transomd.tce.memory.tenant import Tenant
from transomd.tce.replicate import transfer
from transomd.tce.replicate.copies import Copies, Copy
from transomd.tce.replicate.holdings import Holder, Holding, Step, decode, holdings, loadable
from transomd.tce.replicate.offer import Offer, Told, told
from transomd.tce.replicate.peer import Peer
from transomd.tce.replicate.streams import WIDE, YES, Streams

log = logging.getLogger("transom.tce.keeper")

IDLE_S = 3600.0
"""How long a connection may be without a word between two transfers."""
SEARCH_S = 10.0
"""How long a keeper may take to answer a call."""
STRANGERS = 32
"""Connections that may be open without having proved that they are of this job."""
ASKED = 8
"""Keepers that are asked at a time."""


class Post:
    """``holders``: all that is here of a directory; ``tenants``: this node's own ranks."""

    def __init__(
        self,
        token: str,
        port: int,
        holders: Callable[[str], list[Holder]],
        tenants: Callable[[], Sequence[Tenant]],
        copies: Copies,
    ) -> None:
        """Listen on ``port``, on any free one if that is taken. Raises OSError."""
        self.keepers: dict[str, tuple[str, int, frozenset[int]]] = {}
        self.begun: dict[str, Step] = {}
        self.token = token
        self._copies = copies
        self._holders = holders
        self._tenants = tenants
        self._strangers = threading.Semaphore(STRANGERS)
        self._streams: dict[str, Streams] = {}
        try:
            self._listener = socket.create_server(("", port), backlog=128)
        except OSError as error:
            log.warning("port %d cannot be had: %s", port, error)
            self._listener = socket.create_server(("", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    # --- answering ----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                log.warning("peers are not listened to any more: %s", error)
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        peer = Peer(sock)
        streams = Streams(peer)
        try:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                peer.welcome(self.token)
            finally:
                self._strangers.release()
            while True:
                self._answer(streams, peer.receive(IDLE_S))
        except OSError as error:
            log.debug("a peer is gone: %s", error)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("a peer sent what is no request: %r", error)
        finally:
            self._streams.pop(peer.key, None)
            streams.close()

    def _answer(self, streams: Streams, message: dict[str, Any]) -> None:
        asked, peer = message["t"], streams.first
        if asked == "offer":
            offer = transfer.decode(message)
            self.begun[offer.directory] = (offer.state.epoch, offer.state.step)
            transfer.receive(streams, offer, self._copies, self._here, bool(message["insist"]))
        elif asked == "list":
            found = holdings(self._holders(str(message["directory"])))
            peer.send({"t": "held", "held": [one.encode() for one in found]})
        elif asked == "pull":
            self._hand_out(streams, message)
        elif asked == "lead":
            self._streams[peer.key] = streams
            peer.send(YES)
        elif asked == "join":
            self._streams[str(message["key"])].join(peer)
        else:
            raise ValueError(asked)

    def _here(self, offer: Offer, place: Place) -> str:
        """Whether this node's own ranks hold a part alike, or may do so soon (see ``transfer.Here``)."""
        tenants = [tenant for tenant in self._tenants() if str(tenant.directory) == offer.directory]
        alike = [tenant for tenant in tenants if tenant.rank in place.ranks]
        if len(place.ranks) < 2 or (tenants and not alike):
            return "no"
        different = False
        for tenant in alike:
            for entry in tenant.staged():
                if (entry[2].epoch, entry[2].step) == (offer.state.epoch, offer.state.step):
                    known = told(tenant.digests(entry)).get(place.name)
                    if known == offer.digests.get(place.name):
                        return "yes"
                    different = different or known is not None
        return "no" if different else "later"

    def _hand_out(self, streams: Streams, message: dict[str, Any]) -> None:
        """Send a step that somebody wants to load."""
        epoch, step = int(message["epoch"]), int(message["step"])
        for holder in self._holders(str(message["directory"])):
            for entry in holder.staged() if holder.rank == message["rank"] else []:
                arena, slot, state = entry
                if (state.epoch, state.step) == (epoch, step) and arena.acquire(slot, state.seq):
                    taken = False
                    try:
                        taken = self._hand_to(streams, offer_of(str(message["directory"]), holder, entry), arena, slot)
                    finally:
                        # Also where the other side hung up without a word, or the table is damaged.
                        if not taken:
                            quarantine_if_damaged(holder, entry)
                        arena.release(slot)
                    return
        streams.first.send({"t": "gone"})

    @staticmethod
    def _hand_to(streams: Streams, offer: Offer, arena: Arena, slot: int) -> bool:
        """Whether the other side has it now. Raises OSError."""
        result, why = transfer.send(streams, offer, arena, slot, lambda: False, True)
        if result != transfer.DONE:
            log.warning("step %d of rank %d was not taken: %s", offer.state.step, offer.rank, why)
        return result == transfer.DONE

    # --- asking -------------------------------------------------------------------------------------------------

    def search(self, directory: str, rank: int, world_size: int) -> list[Step]:
        """The steps that the rank could load from this node and the others together; asks those that may hold some."""
        held = [*holdings(self._holders(directory)), *(one for _, one in self._abroad(directory, rank, []))]
        return loadable(held, rank, world_size)

    def fetch(self, directory: str, rank: int, world_size: int, step: Step) -> None:
        """Bring here what the rank lacks of a step. Raises OSError, which says of each keeper why it failed."""
        problems: list[str] = []
        held = self._abroad(directory, rank, problems)
        while True:
            here = [one for one in holdings(self._holders(directory)) if (one.epoch, one.step) == step]
            if step in loadable(here, rank, world_size):
                return
            wanted = _next(here, held, rank, world_size, step)
            if wanted is None:
                raise OSError("; ".join(problems) or "no other node holds it any more")
            held.remove(wanted)
            try:
                self._pull(*wanted, directory)
            except OSError as error:
                problems.append(f"{wanted[0]}: {error}")

    def _abroad(self, directory: str, rank: int, problems: list[str]) -> list[tuple[str, Holding]]:
        """What those keepers hold that have something of this rank; ``problems``: those that do not say."""
        near = [name for name, (_, _, ranks) in self.keepers.items() if rank in ranks]
        with ThreadPoolExecutor(ASKED) as pool:
            answers = list(pool.map(lambda name: (name, self._ask(name, directory, problems)), near))
        return [(name, one) for name, found in answers for one in found]

    def _ask(self, name: str, directory: str, problems: list[str]) -> list[Holding]:
        host, port, _ = self.keepers[name]
        try:
            peer = Peer.dial((host, port), self.token, SEARCH_S)
            with contextlib.closing(peer):
                peer.send({"t": "list", "directory": directory})
                return [decode(one) for one in peer.receive()["held"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"the keeper on {name} does not say what it holds: {error}")
            log.warning("%s", problems[-1])
            return []

    def _pull(self, name: str, held: Holding, directory: str) -> None:
        copy = self._copies.of((directory, held.rank))
        copy.claim()
        try:
            why = self._receive(name, held, copy)
        finally:
            copy.busy.release()
        if why:
            raise ConnectionError(why)
        log.info("step %d of rank %d was fetched from %s", held.step, held.rank, name)

    def _receive(self, name: str, held: Holding, copy: Copy) -> str:
        """'', or why it was not received. Where one of several streams fails, the rest comes over one alone."""
        host, port, _ = self.keepers[name]

        def call() -> Peer:
            return Peer.dial((host, port), self.token, SEARCH_S)

        with contextlib.closing(Streams(call())) as streams:
            try:
                streams.lead()
                return self._receive_over(streams, held, copy, call)
            except OSError as error:
                if not streams.widened:
                    raise
                log.warning("step %d of rank %d now comes over one stream: %s", held.step, held.rank, error)
        with contextlib.closing(Streams(call())) as streams:
            return self._receive_over(streams, held, copy)

    def _receive_over(self, streams: Streams, held: Holding, copy: Copy, call: Callable[[], Peer] | None = None) -> str:
        peer, directory = streams.first, copy.directory
        peer.send({"t": "pull", "directory": directory, "rank": held.rank, "epoch": held.epoch, "step": held.step})
        message = peer.receive()
        if message.get("t") != "offer":
            return "it is gone there"
        try:
            offer = transfer.decode(message)
        except (ValueError, KeyError, TypeError) as error:
            return f"it offers what is no step: {error!r}"
        if offer.key != (directory, held.rank):
            return f"it offers what is of rank {offer.rank}"
        if call is not None and offer.state.table_offset >= WIDE:
            streams.widen(call)
        return transfer.take(streams, offer, copy, self._copies, self._here, insist=True, anyhow=True)


def offer_of(directory: str, holder: Holder, entry: tuple[Arena, int, SlotState]) -> Offer:
    """What a held slot is offered as; digests that its owner has not taken yet are taken now. Raises OSError."""
    arena, slot, state = entry
    try:
        table = arena.table(slot, state)
        digests = told(holder.digests(entry)) or _digests_now(holder, entry)
    except ValueError as error:
        raise ConnectionError(str(error)) from error
    return Offer(directory, holder.rank, state, table, digests)


def quarantine_if_damaged(holder: Holder, entry: tuple[Arena, int, SlotState]) -> bool:
    """Read a slot that the caller holds, and never use it again if it does not match its digests."""
    known = told(holder.digests(entry))
    try:
        # Without digests nothing is known of its bytes: that is no damage.
        damaged = _digests_now(holder, entry) != known and bool(known)
    except ValueError:
        damaged = True
    if damaged:
        holder.quarantine(entry)
    return damaged


def _digests_now(holder: Holder, entry: tuple[Arena, int, SlotState]) -> Told:
    """Of the bytes as they are; ValueError if the table is damaged."""
    parts = images(entry[0], entry[1], holder.table(entry))
    return told({part.name: tuple(digest_file(file) for file in part.files) for part in parts})


def _next(
    here: list[Holding], held: list[tuple[str, Holding]], rank: int, world_size: int, step: Step
) -> tuple[str, Holding] | None:
    """What to fetch next: what is the rank's own, then whatever has a part that is still missing."""
    good = [(n, one) for n, one in held if (one.epoch, one.step) == step and one.world_size == world_size]
    own = [one for one in here if one.rank == rank]
    if not own:
        return next((found for found in good if found[1].rank == rank), None)
    missing = set(own[0].needs) - {name for one in here for name in one.names}
    return next((found for found in good if missing & set(found[1].names)), None)
