"""A cable between two keepers, for tests: it counts what goes over it, carries no faster than it may, and is cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Wire:
    """Carries connections to port ``there`` of this machine.

    ``cuts``: after how many bytes each of the first connections is cut. ``rate``: bytes a second of each connection.
    ``carried``: the bytes that each has brought there; ``brought``: back from there.
    """

    def __init__(self, there: int, cuts: list[int], rate: float = 0.0) -> None:
        self.there = there
        self.cuts = cuts
        self.rate = rate
        self.carried: list[int] = []
        self.brought: list[int] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with self._server:
            while not self._closed:
                here, _ = self._server.accept()
                there = socket.create_connection(("127.0.0.1", self.there))
                self.carried.append(0)
                self.brought.append(0)
                cut = self.cuts.pop(0) if self.cuts else 1 << 60
                threading.Thread(target=self._both, args=(here, there, len(self.carried) - 1, cut), daemon=True).start()

    def _both(self, here: socket.socket, there: socket.socket, number: int, cut: int) -> None:
        with here, there:
            back = threading.Thread(target=self._carry, args=(there, here, self.brought, number, 1 << 60), daemon=True)
            back.start()
            self._carry(here, there, self.carried, number, cut)
            back.join()

    def _carry(self, source: socket.socket, target: socket.socket, count: list[int], number: int, cut: int) -> None:
        total, begun = 0, time.monotonic()
        with contextlib.suppress(OSError):
            while total < cut and (content := source.recv(1 << 16)):
                target.sendall(content)
                total += len(content)
                count[number] = total
                if self.rate:
                    time.sleep(max(0.0, begun + total / self.rate - time.monotonic()))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more calls; what is connected goes on until a side hangs up."""
        self._closed = True
        with socket.create_connection(("127.0.0.1", self.port)):
            self._thread.join()
