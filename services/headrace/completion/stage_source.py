"""The rows of one stage in the order of their index: read from what has landed, divided once, held a page at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Final

from msgspec import Raw

from headrace.completion import stage_groups, stage_reading, stage_rows
from headrace.completion.patience import write_patiently
from headrace.completion.stage_mapping import UNFIT, Child, Mapper, Unfit, Upstream
from headrace.completion.stage_reading import PageSize, weight
from headrace.completion.stage_rows import Kept, Position, Source, Stage
from headrace.completion.store import Store
from headrace.contracts.errors import Conflict
from headrace.contracts.messages import ItemError
from headrace.contracts.pipeline import PipelineRecord
from headrace.mesh.crash import crash_point

STOPPED: Final = ("cancelling", "cancelled")


class StageRows:
    """Gives the rows of one stage. `most_bytes` is what a collected row may have.

    `stopped` is true once the stage's own job is cancelled: then there is nothing to feed.
    """

    def __init__(self, store: Store, record: PipelineRecord, stage: Stage, *, most_bytes: int) -> None:
        self._store = store
        self._record = record
        self._stage = stage
        self._spec = record.spec.stages[stage.number]
        self._mapper = Mapper(self._spec)
        self._most = most_bytes
        self._page = PageSize()
        self._first = 0
        self._pending: list[Child] = []
        self.stopped = False

    async def take(self, index: int, limit: int) -> list[Child] | None:
        """Rows `index`.., at most `limit`: an empty list if there are none yet, None if there will be none.

        Raise `Conflict` if `index` rows are stored and the data plane knows fewer.
        """
        at = index - self._first
        if not 0 <= at < len(self._pending):
            self._pending = []
            while not self._pending:
                position = await self._store.read(stage_rows.position, self._stage)
                self.stopped = position.child in STOPPED
                if self.stopped:
                    return []
                if index > position.assigned:
                    msg = (
                        f"stage {self._stage.stage} of pipeline {self._stage.pipeline}: {index:,} rows are stored, and "
                        f"the data plane knows {position.assigned:,}: it is not the one that fed them"
                    )
                    raise Conflict(msg, code="data_plane_lost")
                if index < position.assigned:
                    await self._again(index)
                elif not await self._more(position):
                    return None if position.ended else []
            at = index - self._first
        return list(islice(self._pending, at, at + limit))

    # --- reading what was divided --------------------------------------------------------------------
    async def _again(self, index: int) -> None:
        """Hold the rows from `index` on that are assigned."""
        if self._spec.collect:
            self._first, self._pending = index, await self._groups(index)
            return
        found, rows = await self._store.read(stage_reading.divided, self._stage, index, self._page.rows)
        self._page.seen(rows)
        pages = await asyncio.to_thread(self._children, rows)
        for source, children in zip(found, pages, strict=True):
            if len(children) != source.items:
                msg = (
                    f"row {source.index} of the stage before became {source.items:,} rows of {self._stage.job}, and "
                    f"now {len(children):,}: another version fed them"
                )
                raise Conflict(msg, code="pipeline_changed")
        self._first, self._pending = found[0].first, [child for page in pages for child in page]

    # --- dividing what has arrived -------------------------------------------------------------------
    async def _more(self, position: Position) -> bool:
        """Divide what has arrived since; False if nothing has. What became of it is durable then."""
        if self._spec.collect:
            return position.ended and await self._collect(position)
        arrivals, rows = await self._store.read(
            stage_reading.arrived, self._stage, position.arrival, self._page.rows
        )
        if not arrivals:
            return False
        self._page.seen(rows)
        pages = await asyncio.to_thread(self._children, rows)
        first, found, kept = position.assigned, list[Source](), list[Kept]()
        for row, children in zip(rows, pages, strict=True):
            found.append(Source(row.index, row.generation, first, len(children)))
            kept += [Kept(first + k, Raw(c.kept)) for k, c in enumerate(children) if c.kept is not None]
            first += len(children)
        await write_patiently(self._store, "pipeline", stage_rows.assign, self._stage, arrivals, found, kept)
        crash_point("pipeline-assigned")
        self._first, self._pending = position.assigned, [child for page in pages for child in page]
        return True

    def _children(self, rows: Sequence[Upstream]) -> list[list[Child]]:
        return [self._mapper.children(row) for row in rows]

    # --- collecting ----------------------------------------------------------------------------------
    async def _collect(self, position: Position) -> bool:
        count = await write_patiently(
            self._store, "pipeline", stage_groups.collect, self._stage, self._record.spec
        )
        crash_point("pipeline-collected")
        return count > position.assigned and await self._hold_groups(position.assigned)

    async def _hold_groups(self, first: int) -> bool:
        self._first, self._pending = first, await self._groups(first)
        return True

    async def _groups(self, first: int) -> list[Child]:
        """The rows that groups `first`.. become: as many as make a page, or one that is larger."""
        sizes = await self._store.read(
            stage_groups.sizes, self._stage.job, first, stage_groups.GROUPS_AT_ONCE
        )
        total, count, most = 0, 0, self._page.rows
        while count < len(sizes) and (not count or total + sizes[count] <= most):
            total += sizes[count]
            count += 1
        if total <= most:
            groups, rows = await self._store.read(
                stage_reading.members, self._stage, first=first, end=first + count, position=0, limit=most
            )
            self._page.seen(rows)
            # Of a page that was cut by its bytes the last group may lack members.
            whole = count if len(rows) == total else groups[-1] - first
            if whole and sum(map(weight, rows)) <= self._most:
                return await asyncio.to_thread(self._small_groups, whole, [g - first for g in groups], rows)
        return [await self._large_group(first)]

    def _small_groups(self, count: int, groups: Sequence[int], rows: Sequence[Upstream]) -> list[Child]:
        members: list[list[bytes]] = [[] for _ in range(count)]
        unfit: dict[int, Child] = {}
        for group, row in zip(groups, rows, strict=True):
            if group < count:
                try:
                    members[group].append(self._mapper.member(row))
                except Unfit as e:
                    unfit.setdefault(group, Child(None, unfit=e.error))
        return [unfit.get(k) or self._mapper.collected(found) for k, found in enumerate(members)]

    async def _large_group(self, group: int) -> Child:
        """One group, read page by page: no more of it is held than a row may have."""
        members: list[bytes] = []
        size = 0
        while rows := await self._next_members(group, len(members)):
            self._page.seen(rows)
            try:
                found = await asyncio.to_thread(self._members, rows)
            except Unfit as e:
                return Child(None, unfit=e.error)
            members += found
            size += sum(len(member) + 1 for member in found)
            if size > self._most:
                message = (
                    f"the collected rows have more than {self._most:,} bytes: max_item_bytes allows no more"
                )
                return Child(
                    None, unfit=ItemError(type=f"{UNFIT}too_large", message=message, field="collect")
                )
        return await asyncio.to_thread(self._mapper.collected, members)

    def _members(self, rows: Sequence[Upstream]) -> list[bytes]:
        return [self._mapper.member(row) for row in rows]

    async def _next_members(self, group: int, position: int) -> list[Upstream]:
        _, rows = await self._store.read(
            stage_reading.members,
            self._stage,
            first=group,
            end=group + 1,
            position=position,
            limit=self._page.rows,
        )
        return rows
