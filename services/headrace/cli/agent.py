"""`headrace agent …`: the list of its commands."""

from __future__ import annotations

import typer

from headrace.cli import agent_control, agent_look, agent_open, agent_send
from headrace.cli.agent_run import run_command

app = typer.Typer(
    help="Agents: running them, writing to them, and seeing what they do.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("run", short_help="Run agents in this process")(run_command())
app.command("open", short_help="Make mailboxes, for agents that may not")(agent_open.open_)
app.command("list", short_help="The agents that there are")(agent_look.list_)
app.command("send", short_help="Send a message to an agent")(agent_send.send)
app.command("ask", short_help="Ask an agent and wait for its answer")(agent_send.ask)
app.command("answer", short_help="Fetch a late answer")(agent_send.answer)
app.command("inbox", short_help="What waits in a mailbox")(agent_look.inbox)
app.command("history", short_help="What agents did, in order")(agent_look.history)
app.command("stop", short_help="Let an agent take no more work")(agent_control.stop)
app.command("resume", short_help="Let a stopped agent go on")(agent_control.resume)
