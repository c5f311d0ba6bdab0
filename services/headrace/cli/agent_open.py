"""`headrace agent open`: mailboxes for agents whose own users may make none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.agent_common import agent_name
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_line
from headrace.cli.target import run_on_mesh

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh


def open_(
    agents: Annotated[
        list[str], typer.Argument(metavar="AGENT", help="Names of agents.", show_default=False)
    ],
    *,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Make the mailboxes of agents: mail is taken before they start, and users of least privilege can run them.

    An agent that may make its own does so when it starts. One that exists as it should is left as it is.
    """
    names = [agent_name(name) for name in agents]

    async def work(mesh: Mesh) -> None:
        from headrace.agent.service import open_mailbox

        for name in names:
            await open_mailbox(mesh, name)

    run_on_mesh(folder, url, work)
    if json:
        print_json({"open": names})
    else:
        print_line(f"open: {', '.join(names)}")
