"""Which mesh a command speaks to, and the connection to it.

In this order: `--url`; the mesh of an explicit `--dir`; `HEADRACE_NATS_URL` (or `url` in headrace.toml);
the mesh in `./.headrace`. A mesh that was found but does not run is told apart from one that was not found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.cli.supervisor.layout import port_is_free
from headrace.cli.supervisor.lock import lock_holder
from headrace.contracts.errors import Unavailable
from headrace.mesh.settings import Settings, load_settings, mesh_dir, read_mesh_file

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

T = TypeVar("T")


def find_settings(folder: Path | None, url: str | None, flags: dict[str, object] | None = None) -> Settings:
    """The settings of a command, `url` included; `NotFound` (`no_mesh`) if there is no mesh to speak to."""
    given = dict(flags or {})
    if url:
        given["url"] = url
    elif folder is not None:
        found = read_mesh_file(folder)
        if found is not None:
            given["url"] = found.url
    return load_settings(folder, given)


def run_on_mesh(folder: Path | None, url: str | None, work: Callable[[Mesh], Awaitable[T]]) -> T:
    """Connect, run `work` with the connection, close."""
    settings = find_settings(folder, url)
    return run_async(_with_mesh(settings, work))


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; Ctrl-C cancels it and raises `KeyboardInterrupt`."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


async def connect(settings: Settings, *, name: str = "cli") -> Mesh:
    """A connection; `Unavailable` says whether the local mesh runs at all, and what to do.

    A local mesh that was stopped is told at once; anything else is given the few seconds of a first connect.
    """
    from headrace.mesh.connection import Mesh

    hint = not_running_hint(settings)
    if hint and _nothing_listens(settings):
        raise Unavailable(hint, code="not_running")
    try:
        return await Mesh.connect(settings, name=name)
    except Unavailable as e:
        raise Unavailable(f"{e}; {hint}" if hint else str(e), code=e.code) from None


def not_running_hint(settings: Settings) -> str:
    """What to do if the local mesh that `settings` points to does not run; empty if it does, or is elsewhere."""
    folder = Path(settings.dir)
    found = read_mesh_file(folder)
    if found is None or found.url != settings.url or lock_holder(folder) is not None:
        return ""
    where = "" if folder == mesh_dir(None) else f" --dir {folder}"
    return f"the mesh in {folder} is not running: start it with `headrace up{where}`"


async def _with_mesh(settings: Settings, work: Callable[[Mesh], Awaitable[T]]) -> T:
    mesh = await connect(settings)
    async with mesh:
        return await work(mesh)


def _nothing_listens(settings: Settings) -> bool:
    found = read_mesh_file(Path(settings.dir))
    return found is not None and port_is_free(found.port)
