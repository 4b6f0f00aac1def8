"""Messages between a program and its node's keeper: one JSON object a line over a Unix socket, descriptors beside.

Never anything that is executed when it is read.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
LIMIT = 64 << 20
_DESCRIPTORS = 253
_CREDENTIALS = struct.Struct("3i")


class Line:
    """One end of a connection. Not safe for several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.descriptors: list[int] = []
        self._in = bytearray()
        self._out = bytearray()
        self._passing: list[tuple[int, int]] = []

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def queue(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Put a message in line; ``descriptors`` are duplicated and go with it."""
        self._passing += [(len(self._out), os.dup(descriptor)) for descriptor in descriptors]
        self._out += json.dumps(message).encode() + b"\n"

    @property
    def waiting(self) -> int:
        """Bytes that are still to be sent."""
        return len(self._out)

    def flush(self) -> None:
        """Send what can be sent now, or, on a blocking socket, everything. Raises OSError."""
        while self._out:
            going = [descriptor for at, descriptor in self._passing if at == 0][:_DESCRIPTORS]
            end = next((at for at, _ in self._passing if at > 0), len(self._out))
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", going))] if going else []
            try:
                sent = self.socket.sendmsg([memoryview(self._out)[:end]], ancillary)
            except BlockingIOError:
                return
            self._sent(sent, going)

    def _sent(self, count: int, going: list[int]) -> None:
        for descriptor in going:
            os.close(descriptor)
        del self._out[:count]
        left = self._passing[len(going) :]
        self._passing = [(max(0, at - count), descriptor) for at, descriptor in left]

    def receive(self) -> list[Message]:
        """What has come, whole messages only. Raises ConnectionError at the end, OSError or ValueError."""
        room = socket.CMSG_SPACE(_DESCRIPTORS * 4)
        try:
            content, ancillary, _, _ = self.socket.recvmsg(1 << 20, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors += numbers
        if not content:
            raise ConnectionError("the other side has closed the connection")
        self._in += content
        if len(self._in) > LIMIT:
            raise ValueError("a message is too long")
        *lines, rest = self._in.split(b"\n")
        self._in = rest
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("no message")
        return messages

    def close(self) -> None:
        """Close the connection and what was received or not sent with it."""
        for descriptor in [*self.descriptors, *(descriptor for _, descriptor in self._passing)]:
            os.close(descriptor)
        self.descriptors, self._passing = [], []
        self.socket.close()


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end (SO_PEERCRED, unix(7))."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
