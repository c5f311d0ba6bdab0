"""Prompts that are too large for a message: stored in the object store before the tasks that name them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, NamedTuple

from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import Blob
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point

INPUT_SHARE: Final = 0.5
"""Of a bounded bucket, for prompts: they go only when results are stored, and results need room as well."""
_AT_ONCE: Final = 4


class Upload(NamedTuple):
    """A prompt as an object: `data` is its JSON, `blob` what the task says instead."""

    blob: Blob
    data: bytes


class Uploader:
    """Stores the objects of a batch. What a batch is large is what it holds: see `feed.BATCH_BYTES`."""

    def __init__(self, mesh: Mesh) -> None:
        self._store = BlobStore(mesh)
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def store(self, uploads: Collection[Upload]) -> None:
        """Return once all are stored; storing them again, whoever did it before, changes nothing.

        Raise `JetStreamError` or `Unavailable` as `BlobStore.put` does.
        """
        if not uploads:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for upload in uploads:
                    group.create_task(self._put(upload))
        except* HeadraceError as e:
            raise e.exceptions[0] from None
        crash_point("submit-prompts-stored")

    async def _put(self, upload: Upload) -> None:
        async with self._slots:
            await self._store.put(upload.blob, upload.data, share=INPUT_SHARE)
