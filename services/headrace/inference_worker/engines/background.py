"""Waiting for blocking calls that may never return."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


async def in_daemon(function: Callable[..., object], *args: object) -> None:
    """Run a blocking call in a thread of its own, and return when it has; raise what it raises.

    Unlike the threads of an executor, which the interpreter joins before it ends, this one holds up nothing: who stops
    waiting leaves it behind, and the process can end although the call is stuck.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            function(*args)
        except BaseException as e:  # noqa: BLE001  (it is raised where it is waited for)
            error = e
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name=f"blocking-{function.__name__}", daemon=True).start()
    await done
