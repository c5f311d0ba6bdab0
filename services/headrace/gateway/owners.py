"""Which gateways live: each life of a named gateway has an epoch, and a newer one ends the older.

An epoch is the sequence of a compare-and-set on the gateway's own key, so no two lives share one. An open call of an
older life can be taken up at once; one of another gateway when its lease is over, since nobody else can tell whether it
is dead or only slow.
"""

from __future__ import annotations

import os
import time

import msgspec

from headrace.contracts.errors import Unavailable
from headrace.gateway.records import Me
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE, JetStreamError, last_message
from headrace.mesh.publisher import publish

CACHED_S = 0.5
TRIES = 10


class Owners:
    """The lives of gateways, in the bucket of gateways."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._bucket = mesh.topology.gateways_bucket
        self._seen: dict[str, tuple[float, int]] = {}

    async def begin(self, name: str) -> Me:
        """Begin a life of the gateway `name`: whatever an older one has open is nobody's from now on."""
        subject = f"$KV.{self._bucket}.{name}"
        data = msgspec.json.encode({"pid": os.getpid(), "at_us": time.time_ns() // 1_000})
        for _ in range(TRIES):
            last = await last_message(self._mesh, f"KV_{self._bucket}", subject)
            try:
                ack = await publish(
                    self._mesh,
                    f"KV_{self._bucket}",
                    subject,
                    data,
                    expected_last_subject_seq=last.sequence if last else 0,
                )
            except JetStreamError as e:
                if e.err_code not in (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE):
                    raise
                continue
            return Me(name, ack.seq)
        msg = f"gateway {name} is started all the time by somebody else: give each gateway a name of its own"
        raise Unavailable(msg)

    async def alive(self, owner: str, epoch: int) -> bool:
        """Whether no newer life of `owner` has begun. Whether it still runs, its leases tell."""
        read_at, newest = self._seen.get(owner, (-CACHED_S, -1))
        if newest <= epoch and time.monotonic() - read_at >= CACHED_S:
            found = await last_message(self._mesh, f"KV_{self._bucket}", f"$KV.{self._bucket}.{owner}")
            newest = found.sequence if found else 0
            self._seen[owner] = (time.monotonic(), newest)
        return newest <= epoch
