"""No save is lost, and none waits for ever, where memory is short or a signal comes at a bad moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tce_keepers import state_of

from transomd.tce import CheckpointEngine
from transomd.tce.memory import copy, lease, link

pytest_plugins = ("tce_places",)


def engine_of(directory: Path) -> CheckpointEngine:
    return CheckpointEngine(directory, rank=0, world_size=1, epoch=1)


def test_a_save_for_which_memory_is_short_goes_to_storage_though_nothing_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)

    def short(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(copy, "fill", short)
    assert engine.save(1, state_of(1)).done()
    assert engine.memory_reason == "MemoryError"
    engine.close(60)


def test_a_signals_handler_saves_also_while_the_save_that_it_interrupts_calls_a_keeper(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)
    found = []
    call = link.call

    def interrupted(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(lease, "call", call)
        os.kill(os.getpid(), signal.SIGUSR1)
        return call(*args, **named)

    monkeypatch.setattr(lease, "call", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(engine.save(2, state_of(2))))
    try:
        saved = engine.save(1, state_of(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [handle.done() for handle in found] == [True]
    assert saved.done("memory")
    engine.close(60)
