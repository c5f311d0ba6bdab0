"""Questions to the services behind `hr.api.*`, decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from headrace.contracts.errors import Unavailable

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

T = TypeVar("T")

_BY_GATEWAY: Final = ("submit", "call", "calls.", "budget.", "ledger.", "agents.")
"""Endpoints of the gateway, and beginnings of such; completion answers the others."""


async def ask(
    mesh: Mesh,
    name: str,
    request: Struct | dict[str, Any] | bytes,
    reply: type[T],
    *,
    timeout_s: float = 10.0,
    headers: dict[str, str] | None = None,
) -> T:
    """The decoded reply; the service's own error, or `Unavailable` saying which service did not answer."""
    from headrace.mesh.microservice import call_api

    try:
        data = await call_api(mesh, name, request, timeout_s=timeout_s, headers=headers)
    except Unavailable as e:
        service = "gateway" if name.startswith(_BY_GATEWAY) else "completion"
        if e.code == "no_responders":
            raise Unavailable(
                f"the {service} service does not run: it answers {mesh.subjects.api(name)}; start it with "
                f"`headrace up` or `headrace {service}`",
                code=e.code,
            ) from None
        raise
    try:
        return msgspec.json.decode(data, type=reply, strict=False)
    except msgspec.MsgspecError as e:
        raise Unavailable(
            f"the answer on {mesh.subjects.api(name)} is not what this version expects: {e}"
        ) from None
