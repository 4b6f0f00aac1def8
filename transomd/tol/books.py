"""The store as the operator uses it: on a thread of its own, each call timed, and an outage told once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from transom_sql.store import Conflict, Store, StoreError

from transomd.tol.outage import StoreOutage
from transomd.tol.watchers import Watcher

T = TypeVar("T")


class Books:
    """``store`` is to be called through :meth:`db`, after each of which ``waited`` is told how many seconds it took."""

    def __init__(
        self, store: Store, watcher: Watcher, waited: Callable[[float], None], *, executor: Executor | None = None
    ) -> None:
        self.store = store
        self._watcher = watcher
        self._waited = waited
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix="store")
        self._outage = StoreOutage()

    async def db(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one store call on the store's thread. Raises StoreError."""
        began, ok = time.monotonic(), False
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))
            ok = True
            self._outage.worked(call.__name__)
        except StoreError as error:
            if not isinstance(error, Conflict):
                self._outage.failed(call.__name__, error)
            raise
        finally:
            took = time.monotonic() - began
            self._watcher.stored(took, ok)
            self._waited(took)
        return answer

    def close(self) -> None:
        """End the thread, after what is under way."""
        self._thread.shutdown()
