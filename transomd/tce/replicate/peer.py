"""A connection between two keepers: both prove that they are of one job, then frames and chunks, bounded before read.

The token itself is never sent: each side answers a number that the other has just made up, as agents and launchers do.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_digest

from transomd.proof import NotOfThisJob, check, proof, text

CHUNK = 4 << 20
TIMEOUT_S = 10.0
"""How long a peer may be silent in the middle of something."""
LOOK_S = 0.2
"""How often a wait is broken off to see whether it is still worth it."""
LIMIT, STRANGERS_LIMIT = 64 << 20, 1024
END, STOPPED = 2**64 - 1, 2**64 - 2
"""Instead of a chunk's number: all have been sent; no more are sent, as the memory is wanted for something newer."""
_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<QI16s")


def never() -> bool:
    """Nothing is worth breaking off for."""
    return False


class GaveWay(ConnectionError):
    """The transfer was broken off for something that goes first."""


@dataclass(frozen=True)
class Chunk:
    """What stands before the bytes of a chunk; ``number`` may be END or STOPPED."""

    number: int
    size: int
    digest: bytes


class Peer:
    """One end of a connection. Raises OSError (ConnectionError, TimeoutError); not safe for several threads.

    ``wanted`` is asked while the other side lets us wait: whether to break off (GaveWay). ``key`` is the connection's,
    known to both sides and to nobody else, once they have met. ``wide``: whether the side that was called can add
    streams to it; one of an earlier version does not say so. ``name`` is for people.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.wanted: Callable[[], bool] = never
        self.key = self.name = ""
        self.wide = False
        self._socket = sock
        self._limit = STRANGERS_LIMIT
        sock.settimeout(LOOK_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def dial(cls, address: tuple[str, int], token: str, timeout_s: float = TIMEOUT_S) -> Peer:
        """Call the keeper at ``address``, and see that it is of this job."""
        peer = cls(socket.create_connection(address, timeout_s))
        peer.name = f"{address[0]}:{address[1]}"
        try:
            peer._greet(token)
        except BaseException:
            peer.close()
            raise
        return peer

    def _greet(self, token: str) -> None:
        mine = secrets.token_hex(16)
        self.send({"nonce": mine})
        answer = self.receive()
        theirs = text(answer, "nonce")
        check(answer, _proof(token, "called", mine, theirs))
        self.send({"proof": _proof(token, "caller", mine, theirs)})
        self._limit, self.key, self.wide = LIMIT, mine + theirs, answer.get("wide") is True

    def welcome(self, token: str) -> None:
        """The side that was called: see that the caller is of this job."""
        theirs, mine = text(self.receive(), "nonce"), secrets.token_hex(16)
        self.send({"nonce": mine, "proof": _proof(token, "called", theirs, mine), "wide": True})
        check(self.receive(), _proof(token, "caller", theirs, mine))
        self._limit, self.key = LIMIT, theirs + mine

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        content = json.dumps(message).encode()
        self._send_all(memoryview(_LENGTH.pack(len(content)) + content))

    def receive(self, patience_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The next message, whose first byte may take ``patience_s``."""
        length = _LENGTH.unpack(self._exactly(_LENGTH.size, patience_s))[0]
        if length > self._limit:
            raise NotOfThisJob(f"a message of {length} bytes is too long")
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError):
            raise NotOfThisJob("no message") from None
        if not isinstance(message, dict):
            raise NotOfThisJob("no message")
        return message

    def send_chunk(self, number: int, content: memoryview, portions: Iterable[memoryview]) -> None:
        """Send one chunk with its digest, in portions, each when it comes."""
        self._send_all(memoryview(_CHUNK.pack(number, len(content), xxh3_128_digest(content))))
        for portion in portions:
            self._send_all(portion)

    def send_mark(self, mark: int) -> None:
        """Send END or STOPPED."""
        self._send_all(memoryview(_CHUNK.pack(mark, 0, b"\0" * 16)))

    def receive_head(self) -> Chunk:
        """What the next chunk will be; its bytes are then received by ``receive_into``."""
        return Chunk(*_CHUNK.unpack(self._exactly(_CHUNK.size)))

    def receive_into(self, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes that come."""
        self._receive(memory, TIMEOUT_S)

    def _receive(self, memory: memoryview, patience_s: float) -> None:
        done = 0
        while done < len(memory):
            count = self._patiently(self._socket.recv_into, memory[done:], patience_s)
            if not count:
                raise ConnectionError("the other side has closed the connection")
            done += count

    def _send_all(self, content: memoryview) -> None:
        done = 0
        while done < len(content):
            done += self._patiently(self._socket.send, content[done:], TIMEOUT_S)

    def _patiently(self, act: Callable[[memoryview], int], memory: memoryview, patience_s: float) -> int:
        end = time.monotonic() + patience_s
        while True:
            try:
                return act(memory)
            except TimeoutError:
                if self.wanted():
                    raise GaveWay("the memory was wanted for something else") from None
                if time.monotonic() > end:
                    raise TimeoutError(f"the other side has been silent for {patience_s:.0f} s") from None

    @property
    def gone(self) -> bool:
        """Whether the other side has hung up; to be asked only when it owes us no answer."""
        look = select.poll()
        look.register(self._socket, select.POLLIN)
        try:
            return bool(look.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Hang up, also on a thread that waits in ``receive``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int, patience_s: float = TIMEOUT_S) -> bytes:
        content = bytearray(count)
        self._receive(memoryview(content)[:1], patience_s)
        self._receive(memoryview(content)[1:], TIMEOUT_S)
        return bytes(content)


def _proof(token: str, who: str, caller: str, called: str) -> str:
    return proof(token, "transom-keeper-1", who, caller, called)
