"""Names that follow from what is asked: a call's id from its key, its fingerprint from what it would do.

The id of a call with a key is made of (tenant, agent, key), so the ledger's own compare-and-set on the call's subject
is the index of keys: there is no second store that could disagree, and no race between looking up and inserting.
"""

from __future__ import annotations

import base64
import hashlib

import msgspec
from msgspec import Raw

from headrace.contracts.errors import InvalidInput

ID_LENGTH = 26


def call_id(tenant: str, agent: str, key: str) -> str:
    """The id of the call that this key names: 26 characters of base32, 130 bits of a sha256."""
    digest = hashlib.sha256(_joined(tenant, agent, key)).digest()
    return base64.b32encode(digest[:20]).decode()[:ID_LENGTH].lower()


def key_hash(key: str) -> str:
    """What the ledger keeps of a key: it may hold what nobody should read there."""
    return hashlib.sha256(key.encode()).hexdigest()


def fingerprint(callee: str, operation: str, body: Raw | bytes) -> str:
    """sha256 over callee, operation and the body's canonical JSON: order and spaces make no other body.

    Raise `InvalidInput` if the body is no JSON.
    """
    try:
        value = msgspec.json.decode(bytes(body))
        canonical = msgspec.json.encode(value, order="sorted")
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidInput(
            f"the body is no JSON: {str(e)[:200]}", field="body", code="invalid_json"
        ) from None
    return hashlib.sha256(_joined(callee, operation) + canonical).hexdigest()


def _joined(*parts: str) -> bytes:
    # With their lengths: "ab" + "c" is another thing than "a" + "bc".
    return b"".join(b"%d:%b;" % (len(data), data) for data in (part.encode() for part in parts))
