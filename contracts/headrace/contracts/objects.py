"""What is too large for a message lies in the mesh's object store; here are the names of its objects.

`<job>/<index>@<generation>/<kind>-<digest>`: by the job, so that all of a job's can be found and removed; by the
content, so that whoever stores the same thing again (a resumed submit, a second worker) replaces it by the same bytes,
and never what another one's message refers to. Bodies of governed calls: `calls/<tenant>/<call>/<what>-<digest>`.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final, Literal

from headrace.contracts.messages import Blob

DIGEST: Final = "SHA-256="
CALLS: Final = "calls"
_CALL_PARTS: Final = 4
_DIGEST_CHARACTERS: Final = 16
"""Of the digest in a name: 96 bits, so that two contents of one item do not meet."""

Kind = Literal["input", "result"]


def digest_of(data: bytes) -> str:
    """The digest of an object's bytes, as the object store writes it."""
    return DIGEST + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


def blob_of(key: str, kind: Kind, data: bytes) -> Blob:
    """The reference to `data` as the input or the result of the item `key` (`job/index@generation`).

    >>> blob_of("j/0@1", "input", b"x").name
    'j/0@1/input-LXEWQrcmsEQBYnyp'
    """
    digest = digest_of(data)
    short = digest[len(DIGEST) :][:_DIGEST_CHARACTERS]
    return Blob(name=f"{key}/{kind}-{short}", size=len(data), digest=digest)


def call_blob(tenant: str, call: str, what: str, data: bytes) -> Blob:
    """The reference to a body of a governed call: `what` is `request`, or `outcome-<attempt>`.

    >>> call_blob("t", "c", "outcome-1", b"x").name
    'calls/t/c/outcome-1-LXEWQrcmsEQBYnyp'
    """
    digest = digest_of(data)
    return Blob(
        name=f"{CALLS}/{tenant}/{call}/{what}-{digest[len(DIGEST) :][:_DIGEST_CHARACTERS]}",
        size=len(data),
        digest=digest,
    )


def call_of(name: str) -> tuple[str, str] | None:
    """Tenant and call that an object belongs to; None if it is no call's."""
    parts = name.split("/")
    return (
        (parts[1], parts[2]) if len(parts) == _CALL_PARTS and parts[0] == CALLS and "@" not in name else None
    )


def job_of(name: str) -> str | None:
    """The job that an object belongs to; None if the name is not one of ours."""
    job, slash, rest = name.partition("/")
    return job if slash and "@" in rest else None
