"""A program's line to its node's keeper: found, or started where no agent has one; asked, and listened to."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from transomd.tce.memory.place import agent_socket, own_socket, real
from transomd.tce.memory.wire import Line, Message, peer

ANSWER_S = 20.0
"""How long a keeper may take to answer; it does so at once, unless it was stopped or is starved."""
START_S = 30.0
ANOTHER_IS_THERE = 3
_TRIES = 3
_ENOUGH = 1 << 16
"""As long as so many bytes wait for the keeper to take them, what was staged is not put in line behind them."""
_NOT_HANDED_ON = ("TRANSOM_EPOCH", "TRANSOM_JOB_ID", "RANK", "LOCAL_RANK")
_ROOT = Path(__file__).resolve().parents[3]


class Link:
    """An open line. Not safe for several threads."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._asked = 0
        self._staged: Message | None = None
        self.newest_epoch = 0
        """The newest epoch of which the keeper held something when it was last greeted (0: nothing)."""
        self.news: deque[Message] = deque()

    def ask(
        self, op: str, descriptors: tuple[int, ...] = (), timeout_s: float = ANSWER_S, **details: object
    ) -> tuple[Message, list[int]]:
        """The keeper's answer, and the descriptors with it, which are the caller's. Raises OSError.

        An answer that is overdue ends the line: coming late, its memory would be taken for another answer's.
        """
        self._asked += 1
        self._queue({"op": op, "id": self._asked, **details}, descriptors)
        deadline = time.monotonic() + timeout_s
        while True:
            self._push()
            for message in self._receive():
                if message.get("id") == self._asked:
                    got, self._line.descriptors = self._line.descriptors, []
                    return message, got
            left = deadline - time.monotonic()
            # Asked by itself, as something else may come, or some of this may go, again and again.
            if left <= 0 or not self.wait(left):
                self.close()
                raise TimeoutError(f"the keeper does not answer {op!r}")

    def tell(self, op: str, **details: object) -> None:
        """Send word, without waiting for anything; of much that is ``staged`` the newest is enough. Raises OSError."""
        if op == "staged":
            self._staged = {"op": op, **details}
        else:
            self._queue({"op": op, **details})
        self._push()

    def listen(self) -> None:
        """Take in what the keeper has sent; it comes into ``news``. Raises OSError when the keeper is gone."""
        self._push()
        self._receive()

    def wait(self, seconds: float) -> bool:
        """Wait for something to come, or for room to send what waits."""
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN | (select.POLLOUT if self._line.waiting else 0))
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def close(self) -> None:
        """Hang up."""
        self._line.close()

    def _queue(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Put a message in line, after what was said before it."""
        self._queue_staged()
        self._line.queue(message, descriptors)

    def _queue_staged(self) -> None:
        if self._staged is not None:
            self._line.queue(self._staged)
            self._staged = None

    def _push(self) -> None:
        self._line.flush()
        if self._line.waiting < _ENOUGH:
            self._queue_staged()
            self._line.flush()

    def _receive(self) -> list[Message]:
        answers = []
        try:
            messages = self._line.receive()
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        for message in messages:
            if "t" in message:
                self.news.append(message)
            else:
                answers.append(message)
        return answers


def connect(directory: Path, start: bool) -> Link | None:
    """A line to the keeper of this node: the agent's, else the directory's own, which is started if need be.

    None: there is none, and none was to be started. Raises OSError if there should be one.
    """
    agents = agent_socket()
    path = agents or own_socket(directory)
    deadline = time.monotonic() + START_S
    while True:
        try:
            return Link(_dial(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if not start:
                return None
            if agents is not None or time.monotonic() > deadline:
                raise OSError(f"no keeper listens at {path}") from error
            _start(path)


def hello(link: Link, directory: Path, rank: int, world_size: int) -> Message:
    """Say of which rank and directory the talk will be; what the keeper has of it. Raises OSError."""
    answer, _ = link.ask("hello", directory=real(directory), rank=rank, world_size=world_size)
    link.newest_epoch = max((epoch for epoch, _ in [*answer["steps"], *answer["staged"]]), default=0)
    return answer


def call(directory: Path, rank: int, world_size: int, start: bool) -> Link | None:
    """As ``connect``; the keeper then keeps what it has of this rank as long as the line is open."""
    greeted = greet(directory, rank, world_size, start)
    return greeted[0] if greeted else None


def greet(directory: Path, rank: int, world_size: int, start: bool) -> tuple[Link, Message] | None:
    """As ``call``, with what the keeper answers to ``hello``."""
    for _ in range(_TRIES):
        link = connect(directory, start)
        if link is None:
            return None
        try:
            return link, hello(link, directory, rank, world_size)
        except ConnectionError:
            link.close()  # it was about to end when we called
        except OSError:
            link.close()
            raise
    raise ConnectionError("one keeper after another hangs up")


def _dial(path: Path) -> Line:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
        if peer(sock)[1] != os.geteuid():
            raise PermissionError(f"{path} belongs to another user's process")
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return Line(sock)


def _start(path: Path) -> None:
    """Start a keeper by exec, and wait until it listens; that another one was faster is fine."""
    environ = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "transomd.tce.keeper", f"--socket={path}", "--daemon"],
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=START_S,
            check=False,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"the keeper could not be started: {error}") from error
    if done.returncode not in (0, ANOTHER_IS_THERE):
        raise OSError(f"the keeper could not be started: exit code {done.returncode}")
    time.sleep(0.01)
