"""What shows a long job on standard error: redrawn in place on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.cli.output import console, say

if TYPE_CHECKING:
    from rich.live import Live


class LiveView:
    """Used as a context, so that the terminal is left in order. `live` None: if standard error is a terminal."""

    def __init__(self, *, live: bool | None = None) -> None:
        self._use_live = sys.stderr.isatty() if live is None else live
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._use_live:
            from rich.live import Live

            self._live = Live(console=console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            say(text)
