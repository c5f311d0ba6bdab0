"""The object store of the mesh: what is too large for a message, whole or not there at all.

The format is that of `nats object` (NATS ADR-20): chunks on `$O.<bucket>.C.<id>`, and one message with the object's
size and digest on `$O.<bucket>.M.<base64url of the name>`. All of an object goes into one atomic batch, the first chunk
and the last message with a rollup of their subjects: storing again replaces, and no crash leaves a part. The id of the
chunks is made of the name, so that both are found without looking. Reading asks for messages by sequence: it makes no
consumer, so the least privileged worker may read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec import Struct

from headrace.contracts.errors import Conflict, NotFound, Refused
from headrace.contracts.messages import Blob
from headrace.contracts.objects import digest_of
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import (
    STREAM_STORE_FAILED,
    JetStreamError,
    StoredMessage,
    get_message,
    last_message,
    next_message,
    purge,
    stream_info,
)
from headrace.mesh.publisher import MAX_BATCH, AtomicBatch
from headrace.mesh.wire import OutMessage, header_block

MISSING: Final = "blob_missing"
DAMAGED: Final = "blob_damaged"
CHUNK_BYTES: Final = 256 << 10
_STAGED: Final = 4
"""Chunks that are sent in one piece, and asked for at once."""
_LOOKS: Final = 5
"""An object that changes while it is read is read again."""
_STORE_S: Final = 60.0
_ROLLUP: Final = header_block({"Nats-Rollup": "sub"})


class BucketFull(JetStreamError):
    """The object is not stored: what is stored already leaves no room for it."""

    def __init__(self, what: str) -> None:
        super().__init__(what, status=503, err_code=STREAM_STORE_FAILED)


class Meta(Struct, kw_only=True):
    """The last message of an object, as every client of the object store reads and writes it."""

    name: str
    bucket: str = ""
    nuid: str = ""
    size: int = 0
    mtime: str = ""
    chunks: int = 0
    digest: str = ""
    deleted: bool = False
    options: dict[str, int] = {}


_decode = msgspec.json.Decoder(Meta).decode


class BlobStore:
    """Reads and writes the objects of one connection's mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._stream = mesh.topology.blobs
        self._bucket = mesh.topology.blobs_bucket
        self._underway = 0
        self._chunk_bytes = min(CHUNK_BYTES, mesh.max_payload // 2)
        self.limit = self._chunk_bytes * (MAX_BATCH - 1)
        """Bytes that an object may have: it is one atomic batch."""

    # --- writing -----------------------------------------------------------------------------------
    async def put(self, blob: Blob, data: bytes, *, share: float = 1.0) -> None:
        """Store `data` under the name, size and digest that `blob` says; what had the name before is replaced.

        `share` is how much of a bounded bucket may be used then. Raise `Refused` for more than `limit` bytes,
        `JetStreamError` if the broker refuses it (`BucketFull` among others; nothing is stored), and `Unavailable` if
        that is not known: storing it again is safe.
        """
        if len(data) > self.limit:
            msg = f"object {blob.name} has {len(data):,} bytes; the object store takes {self.limit:,} at most"
            raise Refused(msg, code="too_large")
        self._underway += len(data)
        try:
            if share < 1 and not await self._has_room(share):
                if await self._holds(blob):
                    return
                what = f"the share of {self._stream} that is open to this is used"
                raise BucketFull(f"{what}: there is no room for {len(data):,} bytes")
            await self._store(blob, data)
        finally:
            self._underway -= len(data)

    async def _store(self, blob: Blob, data: bytes) -> None:
        size, subject = self._chunk_bytes, self._chunk_subject(blob.name)
        batch = AtomicBatch(self._mesh, self._stream, timeout_s=_STORE_S)
        chunks = range(0, len(data), size)
        for first in range(0, len(chunks), _STAGED):
            await batch.stage(
                OutMessage(subject, data[at : at + size], b"" if at else _ROLLUP)
                for at in chunks[first : first + _STAGED]
            )
        crash_point("blob-staged")
        meta = Meta(
            name=blob.name,
            bucket=self._bucket,
            nuid=_chunk_id(blob.name),
            size=len(data),
            mtime=datetime.fromtimestamp(time.time(), UTC).isoformat(),
            chunks=len(chunks),
            digest=blob.digest,
            options={"max_chunk_size": size},
        )
        await batch.commit(OutMessage(self._meta_subject(blob.name), msgspec.json.encode(meta), _ROLLUP))

    async def _has_room(self, share: float) -> bool:
        info = await stream_info(self._mesh, self._stream)
        limit, used = int(info["config"]["max_bytes"]), int(info["state"]["bytes"])
        return limit <= 0 or used + self._underway <= limit * share

    async def _holds(self, blob: Blob) -> bool:
        """Whether the object is there already, by its last message: one who stored it was killed, or tries again."""
        meta = _meta_of(await last_message(self._mesh, self._stream, self._meta_subject(blob.name)))
        return meta is not None and not meta.deleted and (meta.size, meta.digest) == (blob.size, blob.digest)

    async def delete(self, name: str) -> None:
        """Remove an object that this class stored, and every trace of it; one that is not there is fine.

        The chunks go first: what a crash leaves behind is still found by its name.
        """
        await purge(self._mesh, self._stream, filter_=self._chunk_subject(name))
        crash_point("blob-half-deleted")
        await purge(self._mesh, self._stream, filter_=self._meta_subject(name))

    async def delete_all(self, names: Collection[str], *, at_once: int = 8) -> None:
        """`delete` each; raise the first error once the others have had their turn."""
        slots = asyncio.Semaphore(at_once)

        async def one(name: str) -> None:
            async with slots:
                await self.delete(name)

        for error in await asyncio.gather(*map(one, names), return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    # --- reading -----------------------------------------------------------------------------------
    async def get(self, blob: Blob) -> bytes:
        """The bytes that `blob` stands for, never more than it says.

        Raise `NotFound` (code `blob_missing`) or `Conflict` (`blob_damaged`) naming the object, `Unavailable` if the
        broker does not answer.
        """
        for _ in range(_LOOKS):
            stored = await last_message(self._mesh, self._stream, self._meta_subject(blob.name))
            meta = _meta_of(stored)
            if stored is None or meta is None or meta.deleted:
                msg = f"object {blob.name} is not in the object store"
                raise NotFound(msg, code=MISSING)
            if (meta.size, meta.digest) != (blob.size, blob.digest):
                msg = f"object {blob.name} holds other bytes than those it was stored with"
                raise Conflict(msg, code=DAMAGED)
            data = await self._chunks(meta, stored.sequence)
            if len(data) == blob.size and await asyncio.to_thread(digest_of, data) == blob.digest:
                return data
        msg = f"object {blob.name} is damaged: its {blob.size:,} bytes are not whole any more"
        raise Conflict(msg, code=DAMAGED)

    async def names(self) -> list[str]:
        """The names of all objects, in no order."""
        prefix = self._meta_subject("")
        info = await stream_info(self._mesh, self._stream, subjects_filter=prefix + ">")
        return [_decoded(subject.removeprefix(prefix)) for subject in info["state"]["subjects"]]

    async def _chunks(self, meta: Meta, sequence: int) -> bytes:
        """What there is of an object's chunks, in order and joined; no more than a chunk beyond its size."""
        subject = f"$O.{self._bucket}.C.{meta.nuid}"
        found: list[bytes] = []
        size, first = 0, sequence - meta.chunks
        for at in range(max(1, first), sequence, _STAGED):
            # One batch stores them in a row before the last message; others may have let something in between.
            numbers = range(at, min(at + _STAGED, sequence))
            messages = await asyncio.gather(*(get_message(self._mesh, self._stream, n) for n in numbers))
            mine = [m.data for m in messages if m is not None and m.subject == subject]
            if len(mine) < len(messages):
                return await self._walk(subject, meta)
            found += mine
            size += sum(map(len, mine))
            if size > meta.size:
                break
        return b"".join(found)

    async def _walk(self, subject: str, meta: Meta) -> bytes:
        found: list[bytes] = []
        size, at = 0, 1
        while size <= meta.size and (message := await self._next(subject, at)) is not None:
            found.append(message.data)
            size, at = size + len(message.data), message.sequence + 1
        return b"".join(found)

    async def _next(self, subject: str, at: int) -> StoredMessage | None:
        return await next_message(self._mesh, self._stream, subject, at)

    # --- subjects ----------------------------------------------------------------------------------
    def _chunk_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.C.{_chunk_id(name)}"

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _chunk_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _decoded(token: str) -> str:
    return base64.urlsafe_b64decode(token).decode("utf-8", "replace")


def _meta_of(stored: StoredMessage | None) -> Meta | None:
    try:
        return None if stored is None else _decode(stored.data)
    except msgspec.MsgspecError:
        return None
