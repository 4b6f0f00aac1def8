"""The keeper: the process that holds what programs staged in memory and brings it to storage, whatever becomes of them.

``python -m transomd.tce.keeper --socket PATH``. A node's agent runs one (``--stay``: as long as the allocation lasts);
without an agent the engine starts one for its directory (``--daemon``), which ends by itself when no program is there
and nothing is left to be written. It never imports torch, and never unpickles anything.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import selectors
import signal
import socket
import time
from pathlib import Path

from transomd.tce.memory.desk import Desk
from transomd.tce.memory.place import Claim
from transomd.tce.memory.wire import Line, peer

log = logging.getLogger("transom.tce.keeper")

NOBODY_S = 5.0
"""How long a keeper without ``--stay`` waits for its first program."""
TICK_S, IDLE_TICK_S = 0.05, 5.0
_PDEATHSIG = 1
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine, -1)
_LOWEST = (2 << 13) | 7


class Keeper:
    """The control thread: it talks, and never touches the store."""

    def __init__(self, listener: socket.socket, stay: bool) -> None:
        self._listener = listener
        self._stay = stay
        self._selector = selectors.DefaultSelector()
        self._awake, self._waker = socket.socketpair()
        self._desk = Desk(self.wake)
        self._pidfds: dict[int, int] = {}
        self._stopping = False
        self._begun = time.monotonic()
        for sock in (self._awake, self._waker):
            sock.setblocking(False)

    def run(self) -> None:
        """Serve until there is nothing more to be done."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._awake, selectors.EVENT_READ, self._woken)
        while not self._done():
            timeout = TICK_S if self._desk.waiting or self._stopping else IDLE_TICK_S
            for key, _ in self._selector.select(timeout if self._desk.lines else TICK_S):
                key.data()
            self._desk.tidy(ending=self._stopping or not self._stay)
            self._send()
        self._listener.close()
        self._desk.close()

    def open(self, token_file: Path, port: int) -> None:
        """Let keepers of the same job on other nodes call; without that there are no copies on other nodes."""
        try:
            self._desk.office.open(token_file.read_text().strip(), port)
        except OSError as error:
            log.warning("no copies go to other nodes: %s", error)

    def stop(self) -> None:
        """End as soon as no program is there any more and everything is on the disk."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Let the control thread look; from any thread, or from a signal."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _done(self) -> bool:
        if self._desk.lines or not self._desk.idle:
            return False
        if self._stay:
            return self._stopping
        return self._stopping or self._desk.served or time.monotonic() - self._begun > NOBODY_S

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        pid, uid = peer(sock)
        if uid != os.geteuid():
            log.warning("refused: process %d belongs to user %d", pid, uid)
            sock.close()
            return
        sock.setblocking(False)
        line = Line(sock)
        self._desk.welcome(line, pid)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._read(line))
        self._watch(line, pid)

    def _watch(self, line: Line, pid: int) -> None:
        """Notice a program's death at once, also when a child of it still holds the connection."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            self._pidfds[line.fileno()] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._gone(line))

    def _read(self, line: Line) -> None:
        try:
            messages = line.receive()
            for message in messages:
                self._desk.answer(line, message)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, ConnectionError):
                log.warning("a program sent what is no request: %s", error)
            self._gone(line)
        except Exception:  # the keeper holds what nobody else has: it lives on
            log.exception("a request failed")
            self._gone(line)

    def _send(self) -> None:
        for line in list(self._desk.lines):
            try:
                line.flush()
            except OSError:
                self._gone(line)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.waiting else 0)
            key = self._selector.get_key(line)
            if key.events != events:
                self._selector.modify(line, events, key.data)

    def _gone(self, line: Line) -> None:
        if line not in self._desk.lines:
            return
        self._selector.unregister(line)
        pidfd = self._pidfds.pop(line.fileno(), None)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
        self._desk.goodbye(line)


def lower_priority() -> None:
    """Give way to the program, on the processors and on the disk."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        # Where the kernel shares processors out among sessions, nice means nothing to other ones (sched(7)).
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE))
    ctypes.CDLL(None).syscall(_IOPRIO_SET, 1, 0, _LOWEST)


def _detach() -> None:
    """Go on in a child of nobody, in a session of its own; whoever started us knows by our end that we listen."""
    if os.fork():
        os._exit(0)
    os.setsid()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="transom-keeper", description=__doc__)
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--stay", action="store_true", help="end only when told to, or when whoever started it ends")
    parser.add_argument("--daemon", action="store_true", help="go on in the background once it listens")
    parser.add_argument(
        "--token-file", type=Path, help="the file with the secret of this job's keepers, who may then call"
    )
    parser.add_argument("--port", type=int, default=0, help="where they call")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Keep until there is nothing to keep; exit code 3: another keeper is at that place."""
    options = _arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper: %(message)s")
    os.chdir("/")
    try:
        claim = Claim(options.socket)
    except BlockingIOError:
        return 3
    try:
        listener = claim.listen()
        if options.daemon:
            _detach()
        elif options.stay:
            with contextlib.suppress(PermissionError):  # started by a person's shell
                os.setsid()
            ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)
        lower_priority()
        keeper = Keeper(listener, options.stay)
        if options.token_file is not None:
            keeper.open(options.token_file, options.port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: keeper.stop())
        keeper.run()
    finally:
        claim.give_up()
    return 0


if __name__ == "__main__":
    code = main()
    # Not sys.exit: nothing that still hangs in the store may keep the process.
    os._exit(code)
