"""What `springline run` prints when a run has ended: where its center, output and plot are."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from springline.center import CenterError
from springline.launch.directory import short
from springline.launch.launcher import Launcher
from springline.launch.program import Program
from springline.monitor.metrics import FOLDER
from springline.monitor.plot import draw
from springline.run import REPORT


def summary(launcher: Launcher, program: Program, status: int) -> Iterator[str]:
    """Draw the plot of a run that has ended and yield what to print.

    Args:
        launcher: the run's.
        program: what its workers ran.
        status: the exit status of the run.
    """
    place = short(launcher.directory)  # it may have been moved
    if failed := launcher.failed:
        yield f"The last lines of {failed.name} ({short(failed.log)}):"
        for line in failed.last_lines():
            yield f"  {line}"
    if launcher.center is None and not launcher.ps and not launcher.lost:
        if status:
            yield f"No center was made yet, so nothing is saved. The output is in {place}/logs."
        else:
            what, logs = program.name, f"{place}/logs"
            yield f"No center was made: does {what} use springline? Its output is in {logs}."
        return
    report = launcher.directory / REPORT
    if report.exists() and not status:
        yield report.read_text("utf-8", "replace").rstrip("\n")
    plot = None
    try:
        plot = draw(launcher.directory)
    except CenterError as error:
        yield f"No plot: {error}"
    words = f"The output of all is in {place}/logs"
    if launcher.center:
        version = launcher.version
        which = "" if version is None else f" (version {version:,})"
        words = f"The center is in {short(launcher.center)}{which}, the workers' output in "
        words += f"{place}/logs"
    if (launcher.directory / FOLDER).exists():
        words += f", the metrics in {place}/{FOLDER}"
    words += f", the plot in {short(plot)}." if plot else "."
    if status and launcher.resumable:
        again = ["springline", "run", "--run", str(place), *program.command]
        where = " (from the script's own checkpoint)" if launcher.ps else ""
        words += f" Go on{where} with: {shlex.join(again)}"
    yield words
