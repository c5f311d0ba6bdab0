"""Reading ahead: a thread takes items from their source while batches of earlier ones are made and run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

AHEAD_ITEMS: Final = 4_096
AHEAD_BYTES: Final = 64 << 20


class ReadAhead(Generic[T]):
    """An iterator over `source` that reads up to `AHEAD_ITEMS` items or `AHEAD_BYTES` bytes ahead, and one item more.

    What the source raises, the iterator raises in its place. `stop` ends the thread at the next item.
    """

    def __init__(self, source: Iterable[T], nbytes: Callable[[T], int]) -> None:
        self._source = source
        self._nbytes = nbytes
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            while not self._items:
                if self._error is not None:
                    raise self._error
                if self._ended or self._stopped:
                    raise StopIteration
                self._changed.wait()
            item, nbytes = self._items.popleft()
            self._bytes -= nbytes
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        """Read no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            for item in self._source:
                nbytes = self._nbytes(item)
                with self._changed:
                    while not self._stopped and self._is_full():
                        self._changed.wait()
                    if self._stopped:
                        return
                    self._items.append((item, nbytes))
                    self._bytes += nbytes
                    self._changed.notify_all()
        except BaseException as e:  # noqa: BLE001  (whoever iterates raises it)
            self._error = e
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _is_full(self) -> bool:
        return len(self._items) >= AHEAD_ITEMS or self._bytes >= AHEAD_BYTES
