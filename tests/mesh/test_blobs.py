"""Objects: whole or not there, read by every client of the object store, and gone without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import nats
import pytest
from nats.js.api import ObjectMeta

from headrace.contracts.errors import Conflict, HeadraceError, InvalidInput, NotFound, Refused
from headrace.contracts.messages import Blob
from headrace.contracts.objects import blob_of, digest_of, job_of
from headrace.mesh.blobs import DAMAGED, MISSING, BlobStore, BucketFull
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import call, stream_info
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings, load_settings

pytestmark = pytest.mark.anyio
MIB = 1 << 20


async def state(mesh: Mesh) -> tuple[int, int]:
    """Messages and bytes of the object store."""
    found = (await stream_info(mesh, mesh.topology.blobs))["state"]
    return int(found["messages"]), int(found["bytes"])


async def theirs(mesh: Mesh) -> tuple[Any, Any]:
    """nats-py's own object store on the same bucket, and its connection."""
    nc = await nats.connect(mesh.settings.url)
    return await nc.jetstream().object_store(mesh.topology.blobs_bucket), nc


@pytest.mark.parametrize("size", [1, 262_144, 262_145, 1_200_000, 20 * MIB])
async def test_what_is_stored_is_read_back_and_removed_without_a_trace(mesh: Mesh, size: int) -> None:
    store, data = BlobStore(mesh), os.urandom(size)
    blob = blob_of("j/3@1", "input", data)
    await store.put(blob, data)
    assert await store.get(blob) == data
    assert await store.names() == [blob.name]
    assert job_of(blob.name) == "j"
    await store.delete(blob.name)
    assert (await state(mesh), await store.names()) == ((0, 0), [])
    await store.delete(blob.name)


async def test_storing_again_replaces_and_leaves_nothing_behind(mesh: Mesh) -> None:
    store = BlobStore(mesh)
    long, short = os.urandom(3 * MIB), os.urandom(MIB)
    await store.put(Blob(name="j/0@1/x", size=len(long), digest=digest_of(long)), long)
    before = await state(mesh)
    await store.put(Blob(name="j/0@1/x", size=len(long), digest=digest_of(long)), long)
    assert await state(mesh) == before
    blob = Blob(name="j/0@1/x", size=len(short), digest=digest_of(short))
    await store.put(blob, short)
    assert await store.get(blob) == short
    assert (await state(mesh))[0] == 5


@pytest.mark.parametrize("size", [5, 700_000])
async def test_nats_own_client_reads_and_lists_what_we_store(mesh: Mesh, size: int) -> None:
    data = os.urandom(size)
    blob = blob_of("j/0@1", "result", data)
    await BlobStore(mesh).put(blob, data)
    store, nc = await theirs(mesh)
    try:
        found = await store.get(blob.name)
        assert found.data == data
        assert (found.info.size, found.info.digest) == (size, blob.digest)
        assert [o.name for o in await store.list()] == [blob.name]
        await store.delete(blob.name)
    finally:
        await nc.close()
    with pytest.raises(NotFound):
        await BlobStore(mesh).get(blob)


async def test_what_nats_own_client_stores_is_read_here_also_with_others_in_between(mesh: Mesh) -> None:
    one, two = os.urandom(900_000), os.urandom(900_000)
    store, nc = await theirs(mesh)
    try:
        await asyncio.gather(
            store.put("a/0@1/x", one), store.put("b/0@1/x", two, ObjectMeta(description="other"))
        )
    finally:
        await nc.close()
    ours = BlobStore(mesh)
    assert await ours.get(Blob(name="a/0@1/x", size=len(one), digest=digest_of(one))) == one
    assert await ours.get(Blob(name="b/0@1/x", size=len(two), digest=digest_of(two))) == two


async def test_what_is_missing_or_damaged_is_named(mesh: Mesh) -> None:
    store, data = BlobStore(mesh), os.urandom(MIB)
    blob = blob_of("j/0@1", "input", data)
    with pytest.raises(NotFound, match=blob.name) as missing:
        await store.get(blob)
    assert missing.value.code == MISSING
    await store.put(blob, data)
    other = Blob(name=blob.name, size=blob.size, digest=digest_of(b"other"))
    with pytest.raises(Conflict, match=blob.name) as damaged:
        await store.get(other)
    assert damaged.value.code == DAMAGED
    info = await stream_info(mesh, mesh.topology.blobs)
    second = int(info["state"]["first_seq"]) + 1
    await call(mesh, f"STREAM.MSG.DELETE.{mesh.topology.blobs}", {"seq": second})
    with pytest.raises(Conflict, match="not whole") as cut:
        await store.get(blob)
    assert cut.value.code == DAMAGED


async def test_readers_of_an_object_that_is_stored_again_and_again_get_it_whole(mesh: Mesh) -> None:
    store, data = BlobStore(mesh), os.urandom(4 * MIB)
    blob = blob_of("j/0@1", "input", data)
    await store.put(blob, data)
    over = asyncio.Event()

    async def again() -> None:
        for _ in range(5):
            await store.put(blob, data)
        over.set()

    async def read() -> int:
        whole = 0
        while not over.is_set():
            with contextlib.suppress(Conflict):  # replaced again and again within one reading
                whole += await store.get(blob) == data
        return whole + (await store.get(blob) == data)

    _, one, other = await asyncio.gather(again(), read(), read())
    assert one
    assert other


async def test_a_full_bucket_refuses_and_keeps_room_for_results(
    nats_server: NatsServer, settings: Settings
) -> None:
    bounded = Settings(url=nats_server.url, dir=settings.dir, durability="relaxed", max_bytes=4 * MIB)
    async with await Mesh.connect(bounded, name="bounded") as mesh:
        await provision(mesh)
        store, data = BlobStore(mesh), os.urandom(1_500_000)
        first, second, third = (blob_of(f"j/{i}@1", "input", data) for i in range(3))
        await store.put(first, data, share=0.5)
        with pytest.raises(BucketFull, match=r"OBJ_HR_blobs .* no room for 1,500,000"):
            await store.put(second, data, share=0.5)
        await store.put(first, data, share=0.5)
        await store.put(second, data)
        with pytest.raises(HeadraceError):
            await store.put(third, data)
        assert sorted(await store.names()) == sorted([first.name, second.name])
        assert await store.get(second) == data
        with pytest.raises(Refused, match="at most"):
            await store.put(third, bytes(store.limit + 1))
        assert mesh.connected


_PUT = """
import asyncio, sys
from headrace.contracts.objects import blob_of
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings

async def main():
    async with await Mesh.connect(Settings(url=sys.argv[1]), name="put") as mesh:
        store, data = BlobStore(mesh), b"x" * 3_000_000
        blob = blob_of("j/0@1", "input", data)
        await store.put(blob, data)
        await store.delete(blob.name)

asyncio.run(main())
"""


@pytest.mark.parametrize(("crash_at", "left"), [("blob-staged", []), ("blob-half-deleted", ["j/0@1/input"])])
async def test_killed_while_storing_or_removing(mesh: Mesh, crash_at: str, left: list[str]) -> None:
    """What is half stored is not there; what is half removed is found by its name, and can be removed."""
    command = [sys.executable, "-c", _PUT, mesh.settings.url]
    env = {**os.environ, "HEADRACE_CRASH_AT": crash_at}
    done = await asyncio.to_thread(subprocess.run, command, env=env, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    store, names = BlobStore(mesh), await BlobStore(mesh).names()
    assert [n.rpartition("-")[0] for n in names] == left
    await store.delete_all(names)
    assert await state(mesh) == (0, 0)


def test_the_limits_of_items_are_checked_against_each_other() -> None:
    flags = {"url": "nats://x", "max_item_bytes": 100_000}
    with pytest.raises(InvalidInput, match="max_item_bytes 100000 is less than large_item_bytes 524288"):
        load_settings(None, flags, environ={})
    found = load_settings(None, flags | {"large_item_bytes": 50_000}, environ={})
    assert (found.large_item_bytes, found.max_item_bytes) == (50_000, 100_000)
