"""From the broker into the data plane: pull a batch, commit it, announce what ended, then ack.

The ack comes only after the commit, so a crash anywhere brings the same results again, and landing them again
changes nothing but the count of duplicates. While one batch is being acked the next is being written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from headrace.completion import job_rows, large_rows, stage_rows
from headrace.completion.announce import Announcer
from headrace.completion.blobs import Blobs
from headrace.completion.large_rows import Large
from headrace.completion.outcomes import insert_results
from headrace.completion.patience import renewed, write_patiently
from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, InvalidInput, Undecodable
from headrace.contracts.messages import JobCompleted, Result
from headrace.mesh import spans
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.settle import Reject, Settler

log = logging.getLogger("headrace.completion")

TRANSACTION_BYTES = 16 << 20
"""Results of one transaction at most: what is not committed yet counts several times in DuckDB's memory limit."""

Pair = tuple[Delivery, Result]


class Landing:
    """Lands results until it is stopped. `landed` is set anew at each commit, for those who wait for a row."""

    def __init__(
        self, mesh: Mesh, store: Store, settler: Settler, announcer: Announcer, blobs: Blobs
    ) -> None:
        options = mesh.settings.completion
        self._mesh = mesh
        self._store = store
        self._settler = settler
        self._announcer = announcer
        self._blobs = blobs
        # One batch being written, one being acked, one arriving.
        self._consumer = BatchConsumer(
            mesh,
            mesh.topology.results_consumer(),
            batch=options.batch_rows,
            wait_s=options.batch_wait_ms / 1_000,
            window=3 * options.batch_rows,
        )
        self._acking: asyncio.Task[None] | None = None
        self._commits = asyncio.Event()
        self.rows = 0

    async def run(self) -> None:
        """Land for ever; after `stop`, land and ack what is in hand, then return."""
        await self._consumer.start()
        async for batch in self._consumer:
            pairs: list[Pair] = []
            endings: list[JobCompleted] = []
            async with renewed(self._mesh, batch, lambda: self._consumer.waiting):
                for part in sliced(await self._readable(batch)):
                    committed, ended = await self._land(*await self._blobs.fetch(part))
                    pairs += committed
                    endings += ended
            if self._acking is not None:
                await self._acking
            self._acking = asyncio.get_running_loop().create_task(self._settle(pairs, endings, batch))
        if self._acking is not None:
            await self._acking

    async def stop(self) -> None:
        """Pull no more."""
        await self._consumer.stop()

    async def next_commit(self, timeout_s: float) -> None:
        """Return after the next commit, or when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._commits.wait()
        except TimeoutError:
            return

    # --- a batch -----------------------------------------------------------------------------------
    async def _readable(self, batch: Sequence[Delivery]) -> list[Pair]:
        """Decode; what is no result goes to the dead letters, its neighbours on."""
        pairs: list[Pair] = []
        for delivery in batch:
            try:
                result = codec.RESULT.decode(delivery.data, delivery.headers)
                if not delivery.subject.endswith(f".{result.function}.{result.job}"):
                    msg = "the result names another job or function than its subject"
                    raise Undecodable(msg)
            except Undecodable as e:
                await self._reject(delivery, str(e))
            else:
                pairs.append((delivery, result))
        return pairs

    async def _reject(self, delivery: Delivery, reason: str) -> None:
        try:
            await self._settler.settle(delivery, Reject(reason))
        except HeadraceError as e:  # it comes again when its lease is over
            log.warning("a result could not be dead-lettered", extra={"reason": str(e)[:300]})

    async def _land(self, pairs: list[Pair], large: Large) -> tuple[list[Pair], list[JobCompleted]]:
        """Commit `pairs`; return those that are committed, and the last events of the jobs that ended.

        If the data itself is refused, the batch is halved until the one that is to blame stands alone.
        """
        started_ns = time.time_ns()
        try:
            endings = await write_patiently(self._store, "results", land, [r for _, r in pairs], large)
        except InvalidInput as e:
            if len(pairs) == 1:
                await self._reject(pairs[0][0], str(e))
                return [], []
            middle = len(pairs) // 2
            first, first_ended = await self._land(pairs[:middle], large)
            second, second_ended = await self._land(pairs[middle:], large)
            return first + second, first_ended + second_ended
        crash_point("landing-committed")
        self.rows += len(pairs)
        self._commits.set()
        self._commits = asyncio.Event()
        spans.landed(pairs, started_ns=started_ns)
        return pairs, endings

    async def _settle(
        self, pairs: list[Pair], endings: list[JobCompleted], given_out: Sequence[Delivery]
    ) -> None:
        try:
            try:
                await self._announcer.announce(endings)
            except* HeadraceError as e:  # the sweep announces them
                log.warning("ended jobs are not announced yet", extra={"reason": str(e.exceptions[0])[:300]})
            if pairs:
                await self._settler.ack_all([d for d, _ in pairs])
                crash_point("landing-acked")
                await self._blobs.forget(pairs)
        except HeadraceError as e:  # they come again, and change nothing
            log.warning("landed results are not acked", extra={"rows": len(pairs), "reason": str(e)[:300]})
        finally:
            self._consumer.release(given_out)


def sliced(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """`pairs` in order, in lists of at most `TRANSACTION_BYTES` (or of one result that is larger)."""
    start = size = 0
    for at, (delivery, result) in enumerate(pairs):
        own = len(delivery.data) + (result.blob.size if result.blob else 0)
        size += own
        if size > TRANSACTION_BYTES and at > start:
            yield pairs[start:at]
            start, size = at, own
    if start < len(pairs):
        yield pairs[start:]


def land(
    connection: Connection, results: Sequence[Result], large: Large = MappingProxyType({})
) -> list[JobCompleted]:
    """Insert `results`, and end the jobs that are complete by them (inside the writer's transaction).

    `large` has the whole of those that only refer to it.
    """
    fresh = large_rows.unknown(connection, results, large)
    jobs = insert_results(connection, results, job_rows.now_us())
    stage_rows.arrive(connection, results)
    large_rows.insert(connection, fresh, large)
    endings = job_rows.finish_full(connection, jobs)
    crash_point("landing-before-commit")
    return endings
