"""`headrace call`: one governed call, answered from the ledger."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from msgspec import Raw

from headrace.cli.api import ask
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table
from headrace.cli.target import run_on_mesh
from headrace.contracts.calls import CallAnswer, CallAsk
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Blob
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

EXITS: Final[dict[str, Exit]] = {
    "completed": Exit.OK,
    "failed": Exit.FAILED,
    "refused": Exit.REFUSED,
    "awaiting_approval": Exit.IN_PROGRESS,
    "in_doubt": Exit.IN_DOUBT,
    "conflict": Exit.KEY_REUSED,
    "in_progress": Exit.IN_PROGRESS,
}
MARGIN_S: Final = 6.0
"""How much longer the command waits than the gateway does."""

Tenant = Annotated[
    str | None,
    typer.Option("--tenant", help="Whose call it is [default: the mesh's tenant].", show_default=False),
]


def call(
    name: Annotated[str, typer.Argument(metavar="CALLEE", help="A callee of headrace.toml, or `generate`.")],
    *,
    body: Annotated[str, typer.Option("--body", help="What is asked: JSON, @FILE, or - for standard input.")],
    tenant: Tenant = None,
    agent: Annotated[str, typer.Option("--agent", help="Who calls.")] = "cli",
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help="Idempotency key: the same key and body never call twice. Needed for money and destructive calls.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, max=3_600, help="Seconds to wait for the answer.")
    ] = 60.0,
    task: Annotated[
        str | None, typer.Option("--task", help="What it is for, as spending is grouped.", show_default=False)
    ] = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Make a governed call: its intent is on record before it is made, its outcome after, and no restart repeats it.

    Exit code 0 completed, 1 failed, 5 refused (policy, budget), 6 in doubt, 7 the key was used with another body,
    8 still in progress (ask again with the same key).
    """
    request = CallAsk(
        callee=check_token("callee", name),
        body=Raw(_body(body)),
        tenant=None if tenant is None else check_token("tenant", tenant),
        agent=check_token("agent", agent),
        key=_key(key),
        wait_s=wait,
        task=task,
    )

    async def work(mesh: Mesh) -> CallAnswer:
        answer = await ask(mesh, "call", request, CallAnswer, timeout_s=wait + MARGIN_S)
        return await _with_body(mesh, answer)

    answer = run_on_mesh(folder, url, work)
    show_answer(answer, json=json)
    code = EXITS.get(answer.state, Exit.FAILED)
    if code:
        raise typer.Exit(code)


def show_answer(answer: CallAnswer, *, json: bool) -> None:
    """Print an answer."""
    if json:
        print_json(answer)
        return
    rows = [
        (n, v) for n in CallAnswer.__struct_fields__ if (v := getattr(answer, n)) not in (None, "", False)
    ]
    print_table(("call", answer.call_id), [(n, msgspec.to_builtins(v)) for n, v in rows if n != "call_id"])


async def _with_body(mesh: Mesh, answer: CallAnswer) -> CallAnswer:
    """`answer` with the body of its outcome, which the gateway leaves out if no message could carry it."""
    outcome = answer.outcome
    if not outcome or outcome.get("blob") is None or outcome.get("body") is not None:
        return answer
    from headrace.mesh.blobs import BlobStore

    blob = msgspec.convert(outcome["blob"], Blob)
    body = msgspec.json.decode(await BlobStore(mesh).get(blob))
    return msgspec.structs.replace(answer, outcome=outcome | {"body": body})


def _key(key: str | None) -> str | None:
    if key is not None and not 1 <= len(key) <= 256:  # noqa: PLR2004  (the contract's bounds)
        raise InvalidInput("--key has 1 to 256 characters", field="key")
    return key


def _body(text: str) -> bytes:
    if text == "-":
        data = sys.stdin.buffer.read()
    elif text.startswith("@"):
        try:
            data = Path(text[1:]).read_bytes()
        except OSError as e:
            raise InvalidInput(f"--body: cannot read {text[1:]}: {e.strerror or e}", field="body") from None
    else:
        data = text.encode()
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidInput(f"--body is no JSON: {str(e)[:200]}", field="body", code="invalid_json") from None
    return data
