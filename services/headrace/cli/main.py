"""The entry point: the list of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from headrace.cli import (
    agent,
    audit,
    budget,
    call,
    calls,
    cancel,
    chaos,
    dead,
    demo,
    doctor,
    functions,
    init,
    jobs,
    ledger,
    pipeline,
    results,
    retry,
    services,
    sql,
    status,
    submit,
    up,
    watch,
)
from headrace.cli.exit_codes import EPILOG, Exit
from headrace.cli.failures import report
from headrace.cli.output import say
from headrace.cli.run import run as run_rows
from headrace.cli.supervisor.tether import attach_lifeline
from headrace.contracts.errors import HeadraceError, InvalidInput

app = typer.Typer(
    name="headrace",
    help="A durable mesh for batch inference on NATS JetStream. Start with `headrace demo`, or `headrace up`.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of the command itself."""


_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("up", up.up, "Run a mesh on this machine"),
    ("demo", demo.demo, "Real prompts through a mesh, start to end"),
    ("submit", submit.submit, "Store a file of prompts as a job"),
    ("run", run_rows, "Run a function over the rows of a file"),
    ("functions", functions.functions, "What work can be submitted for"),
    ("watch", watch.watch, "Follow a job until it ends"),
    ("status", status.status, "Where a job stands"),
    ("results", results.results, "The outcomes of a job, in order"),
    ("audit", audit.audit, "Prove the account of a job"),
    ("cancel", cancel.cancel, "End a job, keep what is finished"),
    ("retry", retry.retry, "Run what failed of a job again"),
    ("jobs", jobs.jobs, "The jobs of a mesh"),
    ("sql", sql.sql, "Ask the data plane"),
    ("call", call.call, "Make a governed call"),
    ("rebuild", ledger.rebuild, "Make the tables of calls again"),
    ("chaos", chaos.chaos, "Break a mesh on purpose, prove nothing is lost"),
    ("init", init.init, "Make streams and consumers, refuse drift"),
    ("doctor", doctor.doctor, "What is not as it should be"),
    ("worker", services.worker_command(), "Run an inference worker"),
    ("completion", services.completion_command(), "Run the completion service"),
    ("gateway", services.gateway_command(), "Run the gateway"),
)
for _name, _function, _short in _COMMANDS:
    app.command(_name, short_help=_short)(_function)
app.add_typer(pipeline.app, name="pipeline", short_help="Stages that feed one another")
app.add_typer(agent.app, name="agent", short_help="Agents: running them, writing to them")
app.add_typer(dead.app, name="dead", short_help="What was given up, and another chance for it")
app.add_typer(calls.app, name="calls", short_help="What was called, and deciding about it")
app.add_typer(budget.app, name="budget", short_help="What tenants and agents may spend")
app.add_typer(ledger.app, name="ledger", short_help="The ledger, proved from itself")


def main() -> None:
    """Run the command line and exit."""
    _open_closed_streams()
    attach_lifeline()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; expected errors are told in one line."""
    try:
        _check_text(arguments)
        app(args=arguments, prog_name="headrace")
    except HeadraceError as e:
        return report(e, as_json="--json" in arguments)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        _quiet_stdout()
        return int(Exit.FAILED)
    except OSError as e:  # the last resort, as for a full disk behind standard output
        _quiet_stdout()
        say(f"error: {e}")
        return int(Exit.FAILED)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(Exit.FAILED if e.code else Exit.OK)
    return int(Exit.OK)


def _check_text(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"the argument {argument[:200]!r} is not UTF-8") from None


def _open_closed_streams() -> None:
    """Give each standard stream that was closed (`>&-`) the null device: libuv aborts on a socket with its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _quiet_stdout() -> None:
    """Nobody takes it any more (`headrace sql … | head`): let the interpreter's own flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
