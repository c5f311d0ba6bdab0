"""Objects of large items, on completion's side: results are fetched before they land, and what nobody needs goes.

What is removed, and when:

- the object of a result once the result has landed and its message is acked
- the object of a prompt once its item is ok; a failed or dead item keeps it, for a retry
- all else of a job that has ended: what a crash, a duplicate or a submit left behind. Of a cancelled job everything,
  since it does not run again

Removing is tidiness: it is tried again by the sweep, and nothing waits for it. A result whose object is gone has landed
before, since nothing else removes it; then it counts as a duplicate, as any repeat does. If somebody else removed it,
the item is `failed` with the type `result_missing`, and carries its task: it is not lost in silence, and a retry runs
it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from headrace.completion.job_rows import ENDED
from headrace.completion.large_rows import Key, key_of
from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.errors import Conflict, HeadraceError, NotFound, Unavailable, Undecodable
from headrace.contracts.messages import Blob, ItemError, Result
from headrace.contracts.objects import job_of
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import JetStreamError

log = logging.getLogger("headrace.completion")

SWEEP_S: Final = 60.0
SOON_S: Final = 1.0
"""Shortest time between two sweeps: jobs may end by the hundred."""
AT_ONCE: Final = 4

Pair = tuple[Delivery, Result]

_NAMES = "SELECT unnest(from_json($1::VARCHAR, '[\"VARCHAR\"]'))"

_OK = f"""
SELECT DISTINCT input_blob FROM outcomes
WHERE status = 'ok' AND job IN ({_NAMES}) AND input_blob IN (SELECT unnest(from_json($2::VARCHAR, '["VARCHAR"]')))"""  # noqa: S608

_ENDED = f"SELECT job, state FROM jobs WHERE job IN ({_NAMES})"  # noqa: S608

_NEEDED = f"""
SELECT DISTINCT input_blob FROM outcomes
WHERE job IN ({_NAMES}) AND input_blob IS NOT NULL AND status IN ('failed', 'dead') AND input_blob NOT IN (
    SELECT input_blob FROM outcomes WHERE job IN ({_NAMES}) AND input_blob IS NOT NULL AND status = 'ok')"""  # noqa: S608


class Blobs:
    """Fetches and removes the objects of one mesh."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh = mesh
        self._store = store
        self._objects = BlobStore(mesh)
        self._most = mesh.settings.max_item_bytes
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._ended = asyncio.Event()

    # --- landing -----------------------------------------------------------------------------------
    async def fetch(self, pairs: Sequence[Pair]) -> tuple[list[Pair], dict[Key, bytes]]:
        """`pairs` as they are to land, and the JSON of those results that came by reference.

        While the broker is away it waits: the caller renews the leases.
        """
        if all(result.blob is None for _, result in pairs):
            return list(pairs), {}
        large: dict[Key, bytes] = {}
        landing = await asyncio.gather(*(self._whole(result, large) for _, result in pairs))
        return [(delivery, result) for (delivery, _), result in zip(pairs, landing, strict=True)], large

    async def _whole(self, result: Result, large: dict[Key, bytes]) -> Result:
        if result.blob is None:
            return result
        try:
            async with self._slots:
                data = await self._get(result.blob)
            _check(result, data)
        except (NotFound, Conflict, Undecodable) as e:
            kind = "result_missing" if isinstance(e, NotFound) else "result_damaged"
            return replace(
                result, status="failed", error=ItemError(type=kind, message=str(e)[:2_048]), blob=None
            )
        large.setdefault(key_of(result), data)
        return replace(result, task=None)

    async def _get(self, blob: Blob) -> bytes:
        attempt = 0
        while True:
            try:
                return await self._objects.get(blob)
            except (Unavailable, JetStreamError) as e:
                if self._mesh.closed.is_set():
                    raise
                delay = backoff_s(attempt)
                attempt += 1
                extra = {"object": blob.name, "reason": str(e)[:300], "retry_in_s": round(delay, 2)}
                log.warning("a large result is not fetched yet", extra=extra)
                await asyncio.sleep(delay)

    # --- removing ----------------------------------------------------------------------------------
    async def forget(self, pairs: Sequence[Pair]) -> None:
        """Remove what these landed and acked results leave; what fails is left to the sweep."""
        names = {result.blob.name for _, result in pairs if result.blob is not None}
        inputs = {r.input_blob: r.job for _, r in pairs if r.input_blob is not None and r.status == "ok"}
        if not names and not inputs:
            return
        crash_point("blobs-left")
        try:
            if inputs:
                # Only if the outcome that counts is ok: this one may have come second, and changed nothing.
                names.update(await self._store.read(_ok, list(inputs.values()), list(inputs)))
            await self._objects.delete_all(names)
        except HeadraceError as e:
            log.info("objects stay for now", extra={"objects": len(names), "reason": str(e)[:300]})

    def ended(self) -> None:
        """A job has ended: sweep soon."""
        self._ended.set()

    async def sweep_for_ever(self) -> None:
        """Sweep at the start, after jobs have ended, and now and then."""
        while True:
            try:
                await self.sweep()
            except HeadraceError as e:
                log.warning("objects of ended jobs stay for now", extra={"reason": str(e)[:300]})
            await asyncio.sleep(SOON_S)
            try:
                async with asyncio.timeout(SWEEP_S - SOON_S):
                    await self._ended.wait()
            except TimeoutError:
                pass
            self._ended.clear()

    async def sweep(self) -> int:
        """Remove the objects of ended jobs that no retry could need; return how many.

        The names are read before the states: what a retry stores after that is not among them.
        """
        by_job: defaultdict[str, list[str]] = defaultdict(list)
        for name in await self._objects.names():
            job = job_of(name)
            if job is not None:
                by_job[job].append(name)
        if not by_job:
            return 0
        needed = await self._store.read(_needed, list(by_job))
        names = [name for job, kept in needed.items() for name in by_job[job] if name not in kept]
        await self._objects.delete_all(names)
        if names:
            log.info("objects of ended jobs are removed", extra={"objects": len(names)})
        return len(names)


def _check(stub: Result, data: bytes) -> None:
    whole = codec.RESULT.decode(data)
    if (*key_of(whole), whole.function) != (*key_of(stub), stub.function):
        msg = f"the object of {stub.job}/{stub.index}@{stub.generation} holds the result of another item"
        raise Undecodable(msg)


# --- SQL ------------------------------------------------------------------------------------------
def _ok(connection: Connection, jobs: Collection[str], inputs: Collection[str]) -> list[str]:
    """Those of `inputs` whose item is ok."""
    rows = connection.execute(_OK, [_json(jobs), _json(inputs)]).fetchall()
    return [name for (name,) in rows]


def _needed(connection: Connection, jobs: Collection[str]) -> dict[str, set[str]]:
    """Those of `jobs` that have ended, with the prompts that a retry would need."""
    states = dict(connection.execute(_ENDED, [_json(jobs)]).fetchall())
    needed: dict[str, set[str]] = {job: set() for job, state in states.items() if state in ENDED}
    open_to_retry = [job for job in needed if states[job] != "cancelled"]
    for (name,) in connection.execute(_NEEDED, [_json(open_to_retry)]).fetchall():
        needed[job_of(name) or ""].add(name)
    return needed


def _json(names: Collection[str]) -> str:
    return msgspec.json.encode(list(names)).decode()
