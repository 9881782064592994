"""An event loop in a thread of its own, called from threads that wait for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

LOOK_S = 0.5
"""Between two looks at what else must be minded while waiting."""

T = TypeVar("T")
log = logging.getLogger("cohort")


class BackgroundLoop:
    """Runs coroutines until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None]) -> T:
        """What the coroutine returns or raises. The calling thread calls `meanwhile` at once and now and then.

        Ends the coroutine when it is interrupted itself (KeyboardInterrupt)."""
        future = asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)
        try:
            meanwhile()
            while not concurrent.futures.wait([future], LOOK_S).done:
                meanwhile()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it beside what is called, until the loop is closed."""
        asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop).add_done_callback(_log_failure)

    def post(self, function: Callable[[], None]) -> None:
        """Have it called on the loop, soon."""
        self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End everything that runs on it, then run `last` and nothing more. Nothing happens when called again."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        asyncio.run_coroutine_threadsafe(last(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        finally:
            self._tasks.discard(task)

    async def _cancel(self) -> None:
        """Ours alone: libraries end the tasks that they started themselves, and in their own way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(future: concurrent.futures.Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("what minds the vLLM servers has failed", exc_info=error)
