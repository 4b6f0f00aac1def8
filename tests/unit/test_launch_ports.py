"""The port of the program's rendezvous."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from transomd.launch import ports


def test_it_is_none_that_the_kernel_gives_away() -> None:
    low, high = ports.kernels_range()
    for port in {ports.free_port() for _ in range(50)}:
        assert port >= ports.FIRST
        assert not low <= port <= high


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", number)
        monkeypatch.setattr(ports, "LAST", number)
        monkeypatch.setattr(ports, "kernels_range", lambda: (number + 1, number + 1))
        assert ports.free_port() != number


@pytest.mark.parametrize("text", ["", "one two", "1 2 3"])
def test_a_range_that_cannot_be_read_is_linuxs_default(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(text)
    monkeypatch.setattr(ports, "_KERNELS", file)
    assert ports.kernels_range() == (32768, 60999)
    monkeypatch.setattr(ports, "_KERNELS", tmp_path / "absent")
    assert ports.kernels_range() == (32768, 60999)
