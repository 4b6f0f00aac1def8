"""One step of one rank from keeper to keeper: offered, asked for by chunks, published on full match.

Either side may die at any point. What has come counts when the same step is offered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

from xxhash import xxh3_128_digest

from transomd.tce.crew import taken
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.memory.table import Place
from transomd.tce.rate import Cap
from transomd.tce.replicate.copies import Copies, Copy, Incoming, NotYet, Refused, piece
from transomd.tce.replicate.offer import Offer
from transomd.tce.replicate.peer import CHUNK, END, STOPPED, GaveWay, Peer, never
from transomd.tce.replicate.streams import Streams

UNCAPPED = Cap(0)
ROUNDS = 4
"""How often what arrived damaged is asked for again."""
DONE, LATER, REFUSED = "done", "later", "refused"
FINISH_S = 120.0
"""How long the receiver may take to read everything once more before it publishes."""
Here = Callable[[Offer, Place], str]
"""Whether a part is on this node anyhow, as its own ranks hold it alike: 'yes', 'no', or 'later', as it soon may be."""


def encode(offer: Offer) -> dict[str, Any]:
    """An offer as a message."""
    return {
        "t": "offer",
        "directory": offer.directory,
        "rank": offer.rank,
        "state": list(astuple(offer.state)),
        "table": offer.table.decode(),
        "digests": offer.digests,
    }


def decode(message: dict[str, Any]) -> Offer:
    """The offer in a message; ValueError, KeyError or TypeError if it is none."""
    state = SlotState(*(int(number) for number in message["state"]))
    if state.state != STAGED or not 0 <= state.table_offset < 1 << 50:
        raise ValueError("no staged slot")
    return Offer(str(message["directory"]), int(message["rank"]), state, message["table"].encode(), message["digests"])


def send(
    streams: Streams,
    offer: Offer,
    arena: Arena,
    slot: int,
    wanted: Callable[[], bool],
    insist: bool,
    cap: Cap = UNCAPPED,
) -> tuple[str, str]:
    """Offer a slot that the caller keeps from being written to, and send what the other side asks for.

    What became of it (DONE, LATER, REFUSED), and why. ``wanted``: whether the memory is wanted for something newer,
    which ends the transfer (LATER, or GaveWay where the other side is silent). ``insist``: the other side must not wait
    until it has a part anyhow. ``cap`` bounds the bytes per second. Raises OSError.
    """
    peer, end = streams.first, offer.state.table_offset
    streams.give_way_to(wanted)
    peer.send({**encode(offer), "insist": insist})
    while True:
        answer = peer.receive(FINISH_S)
        if answer.get("t") != "want":
            return str(answer.get("t")), str(answer.get("why", ""))
        numbers = _numbers(answer["chunks"], -(-end // CHUNK))
        if not _give_all(streams, ((number, piece(arena, slot, number, end)) for number in numbers), wanted, cap):
            return LATER, "the memory was wanted for something newer"


def _give_all(streams: Streams, pieces: Iterable[tuple[int, memoryview]], wanted: Callable[[], bool], cap: Cap) -> bool:
    """Send over all streams; False if the memory was wanted before all was sent."""
    todo = deque(pieces)
    return all(streams.each(lambda stream: _give(stream, taken(todo), wanted, cap)))


def _give(peer: Peer, pieces: Iterable[tuple[int, memoryview]], wanted: Callable[[], bool], cap: Cap) -> bool:
    """Send over one stream what the others leave; False if the memory was wanted before all was sent."""
    for number, content in pieces:
        if wanted():
            peer.send_mark(STOPPED)
            return False
        peer.send_chunk(number, content, cap.portions(content, wanted))
    peer.send_mark(END)
    return True


def receive(streams: Streams, offer: Offer, copies: Copies, here: Here, insist: bool) -> None:
    """Answer an offer that nobody asked for; who waits to load another step of the rank goes first. Raises OSError."""
    copy = copies.of(offer.key)
    if not copy.busy.acquire(blocking=False):
        _answer(streams.first, LATER, "another transfer of this rank is under way")
        return
    streams.give_way_to(copy.awaited.is_set)
    try:
        take(streams, offer, copy, copies, here, insist)
    finally:
        streams.give_way_to(never)
        copy.busy.release()


def take(
    streams: Streams, offer: Offer, copy: Copy, copies: Copies, here: Here, insist: bool, anyhow: bool = False
) -> str:
    """Take of an offer what is not here, publish it, and say so; '', or why it is not here. Raises OSError.

    For who has made ``copy``, which is of this rank, ``busy``. ``anyhow``: also what is older than a copy that is here.
    """
    peer = streams.first
    try:
        places = offer.checked_table().places
        if copy.has(offer):
            peer.send({"t": DONE})
            return ""
        found = {place.name: here(offer, place) for place in places}
        if "later" in found.values() and not insist:
            return _answer(peer, LATER, "this node will have it anyhow")
        without = [name for name, answer in found.items() if answer == "yes"]
        got = copy.begin(offer, without, lambda size: copies.make(size, offer), anyhow)
        for _ in range(ROUNDS):
            if got.missing:
                peer.send({"t": "want", "chunks": _ranges(got.missing)})
                if not all(streams.each(lambda stream: _take(stream, got))):
                    return "the sender stopped"
            if not got.missing:
                break
        else:
            return _answer(peer, REFUSED, f"after {ROUNDS} tries it still arrives damaged")
        if wrong := copy.finish():
            return _answer(peer, REFUSED, f"{', '.join(wrong)} does not match its digests")
        copies.tidy(offer)
        peer.send({"t": DONE})
        return ""
    except NotYet as error:
        return _answer(peer, LATER, str(error))
    except (Refused, ValueError) as error:
        return _answer(peer, REFUSED, str(error))


def _take(peer: Peer, got: Incoming) -> bool:
    """Receive chunks over one stream until no more come; False if the sender stopped. What is damaged stays missing."""
    while (head := peer.receive_head()).number != END:
        if head.number == STOPPED:
            return False
        try:
            memory = got.memory(head.number)
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        if head.size != len(memory):
            raise ConnectionError(f"chunk {head.number} has {head.size} bytes instead of {len(memory)}")
        peer.receive_into(memory)
        if xxh3_128_digest(memory) == head.digest:
            got.missing.discard(head.number)
        if peer.wanted():
            raise GaveWay("somebody waits to load")
    return True


def _answer(peer: Peer, what: str, why: str) -> str:
    peer.send({"t": what, "why": why})
    return why


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] = number + 1
        else:
            found.append([number, number + 1])
    return found


def _numbers(ranges: Any, count: int) -> list[int]:
    """The chunks that are asked for; ConnectionError if the slot has not so many."""
    try:
        numbers = [number for first, end in ranges for number in range(max(0, int(first)), min(int(end), count))]
        if sum(int(end) - int(first) for first, end in ranges) != len(numbers):
            raise ValueError("chunks beyond the end")
    except (TypeError, ValueError) as error:
        raise ConnectionError(f"no chunks can be asked for so: {error}") from error
    return numbers
