"""The command line: `springline run`, `top`, `plot`, `export`, `ls`, `clean`."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from springline import __version__
from springline import cli_options as options
from springline.center import CenterError
from springline.center.memory_file import TMPFS
from springline.launch.directory import RUNS, LaunchError, find_run, is_at_work, short
from springline.launch.launcher import Launcher
from springline.launch.program import Program
from springline.launch.request import ClusterRequest, RestartPolicy

app = typer.Typer(
    name="springline",
    help="Train one model on many loosely coupled workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"springline {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train one model on many loosely coupled workers."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: options.Script,
    arguments: options.Arguments = None,
    module: options.Module = False,
    workers: options.Workers = None,
    ps: options.ParameterServers = None,
    directory: options.RunOption = None,
    max_restarts: options.MaxRestarts = RestartPolicy.most,
    restart_window: options.RestartWindow = RestartPolicy.window,
    start_from: options.StartFrom = None,
    yes: options.Yes = False,
    no_live: options.NoLive = False,
    address: options.Address = None,
    center_shards: options.CenterShards = None,
    storage: options.Storage = None,
    cpus: options.Cpus = None,
    gpus: options.Gpus = None,
    working_dir: options.WorkingDirectory = None,
    env: options.Env = None,
) -> None:
    """Start SCRIPT on many workers, watch them, and keep the center."""
    from springline.monitor.screen import Screen
    from springline.monitor.summary import summary
    from springline.monitor.words import many

    console, program = Console(), Program(script, arguments or [], module)
    copied = str(working_dir) if working_dir else None

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with _clear_errors():
        launcher = Launcher(
            program,
            workers=workers,
            ps=ps,
            directory=directory,
            cluster=ClusterRequest(
                address, center_shards, storage, cpus, gpus, copied, env or None
            ),
            restarts=RestartPolicy(max_restarts, restart_window),
            start_from=start_from,
            confirm=lambda text: yes or (_is_terminal() and typer.confirm(text)),
            say=say,
        )
    place = short(launcher.directory)
    start = "Going on with the run in" if launcher.continues else "A new run in"
    who = many(launcher.workers, "worker")
    who += f" and {many(launcher.ps, 'parameter server')}" if launcher.ps else ""
    if launcher.address:
        who += f" of the cluster at {launcher.address}, the center is {launcher.center_name}"
    say(f"{start} {place}: {script} on {who}.")
    live = console.is_terminal and not no_live
    with _clear_errors(), Screen(launcher.directory, console, live=live) as screen:
        status = launcher.run(screen.refresh)
    for line in summary(launcher, program, status):
        say(line)
    raise typer.Exit(status)


@app.command()
def top(
    directory: options.RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Watch a run from outside, until it ends or Ctrl-C."""
    from springline.monitor.screen import Screen

    console = Console()
    with _clear_errors():
        find_run(directory)
        with (
            contextlib.suppress(KeyboardInterrupt),
            Screen(directory, console, live=once or console.is_terminal) as screen,
        ):
            while not once and is_at_work(directory):
                screen.refresh()
                time.sleep(0.1)
        console.print()
        if screen.trouble:  # which it shows
            raise typer.Exit(1)


@app.command()
def plot(directory: options.RunArgument) -> None:
    """Draw a run: loss and accuracy against time, steps and bytes exchanged."""
    from springline.monitor.plot import draw

    with _clear_errors():
        path = draw(find_run(directory))
    if path is None:
        raise typer.Exit(1)
    typer.echo(f"The plot is in {path}.")


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's directory, or its center's directory in a `--storage`."
        ),
    ],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a run's center as safetensors, under the model's own names."""
    from springline.launch.export import export as export_center

    with _clear_errors():
        source = export_center(run, path, force)
    typer.echo(f"The center ({source}) is in {path}.")


@app.command()
def ls(directory: options.RunsArgument = Path(RUNS)) -> None:
    """List the runs in DIR, and what memory and disk they hold."""
    from springline.launch.holdings import find_holdings
    from springline.monitor.listing import show

    holdings = find_holdings(_check_there(directory))
    if not holdings:
        typer.echo(
            f"There are no runs in {directory}, and no memory of yours is in {TMPFS}. "
            "`springline run SCRIPT` starts a run."
        )
        return
    show(holdings, Console())
    unused = [s.nbytes for h in holdings for s in h.segments if not s.mapped]
    if unused:
        typer.echo(f"No process uses {decimal(sum(unused))} in {TMPFS}: see `springline clean`.")


@app.command()
def clean(
    directory: options.RunsArgument = Path(RUNS),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Free memory and temporary files that no process uses. No run and no checkpoint is removed."""
    from springline.launch.clean import find_unused, free_all

    found = find_unused(_check_there(directory))
    if not found:
        typer.echo("There is nothing to free.")
        return
    for unused in found:
        typer.echo(f"{decimal(unused.nbytes):>10}  {unused.what}")
    if not yes and not _is_terminal():
        command = shlex.join(["springline", "clean", str(directory), "--yes"])
        typer.echo(f"Nothing is freed yet. To free this: {command}")
        raise typer.Exit(1)
    if not yes and not typer.confirm(f"Free {decimal(sum(u.nbytes for u in found))}?"):
        raise typer.Exit(1)
    freed, failed = free_all(found)
    for text in failed:
        typer.echo(f"springline: {text}", err=True)
    typer.echo(f"{decimal(freed)} freed.")
    raise typer.Exit(1 if failed else 0)


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Turn the errors that we know into one sentence and an exit status."""
    try:
        yield
    except (LaunchError, CenterError) as error:
        typer.echo(f"springline: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, LaunchError) else 1) from error


def _is_terminal() -> bool:
    """Whether the user can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _check_there(directory: Path) -> Path:
    """Return a directory of runs; refuse one that is not there, but for the default."""
    with _clear_errors():
        if not directory.is_dir() and directory != Path(RUNS):
            raise LaunchError(f"There is no directory {directory}.")
    return directory


if __name__ == "__main__":
    app()
