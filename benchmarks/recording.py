"""`kill -9` in the middle of a run, as a moving picture: docs/kill.svg.

    python benchmarks/recording.py

A real run in a real terminal: what `springline run` writes is replayed, at the speed at which it
came. The words below it are of this script, which kills a worker. The picture moves by CSS alone;
where a reader wants no motion it shows the end.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyte

from springline.launch_state import LaunchState
from springline.monitor.status import NotARunError, StatusReader

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/shakespeare.py"
COLUMNS, ROWS = 92, 31
WORKERS, VICTIM = 3, 1
FRAME = 0.5  # seconds, at least, between two pictures
REST = 5.0  # seconds for which the last one stays
WIDTH, HEIGHT = 8.4, 18.0  # of a character
BACKGROUND, FOREGROUND = "#16181d", "#d7dae0"
COLORS = {
    "red": "#ff6b6b",
    "green": "#7bd88f",
    "brown": "#e8c46b",
    "yellow": "#e8c46b",
    "blue": "#6cb6ff",
    "magenta": "#d2a8ff",
    "cyan": "#5ccfe6",
    "white": FOREGROUND,
    "default": FOREGROUND,
}
Rows = tuple[str, ...]  # of markup


@dataclass(frozen=True)
class Frame:
    """What the terminal shows from a moment on."""

    seconds: float
    rows: Rows


def row(line: dict[int, pyte.screens.Char]) -> str:
    """Return a line of the terminal as markup: a piece of text for each color."""
    cells = [(column, line[column]) for column in range(COLUMNS)]
    pieces = []
    for (color, bold), group in groupby(cells, lambda cell: (cell[1].fg, cell[1].bold)):
        here = list(group)
        text = "".join(cell.data for _, cell in here)
        if text.strip():
            fill = COLORS.get(color, FOREGROUND if color == "default" else f"#{color}")
            weight = ' font-weight="bold"' if bold else ""
            at = f'x="{here[0][0] * WIDTH:.1f}" textLength="{len(text) * WIDTH:.1f}"'
            pieces.append(f'<tspan {at} fill="{fill}"{weight}>{html.escape(text)}</tspan>')
    return "".join(pieces)


class Killer:
    """Kills a worker once, when it has come to a step."""

    def __init__(self, run: Path, step: int) -> None:
        self.pid: int | None = None
        self._run, self._step = run, step
        self._reader = StatusReader(run)

    def look(self) -> None:
        try:
            status = self._reader.read()
        except NotARunError:  # not yet
            return
        launch = LaunchState.read(self._run)
        if launch and len(status.workers) > VICTIM and status.workers[VICTIM].step >= self._step:
            self.pid = launch.workers[VICTIM].pid
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)


def record(folder: Path, options: list[str], kill_at: int) -> Iterator[Frame]:
    """Run it in a folder, in a terminal of its own; yield what it shows, and when."""
    (folder / "examples").symlink_to(ROOT / "examples")
    run = Path("runs") / "kill"
    asked = f"springline run --workers {WORKERS} {SCRIPT} --rule diloco"
    command = [sys.executable, "-m", *asked.split(), *options]
    command[4:4] = ["--run", str(run)]
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(ROWS))
        os.execv(sys.executable, command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    killer, began, last = Killer(folder / run, kill_at), time.monotonic(), 0.0
    prompt = f'<tspan x="0" fill="{FOREGROUND}">$ {html.escape(asked)}</tspan>'
    shown: Rows = ()
    while True:
        if killer.pid is None:
            killer.look()
        ready, _, _ = select.select([terminal], [], [], 0.1)
        try:
            read = os.read(terminal, 65536) if ready else b""
        except OSError:  # all who could write to it have ended
            break
        stream.feed(read)
        now = time.monotonic() - began
        if now - last < FRAME:
            continue
        below = f"$ kill -9 {killer.pid}    # worker {VICTIM}" if killer.pid else ""
        rows = (
            prompt,
            *(row(screen.buffer[k]) for k in range(ROWS)),
            f'<tspan x="0" fill="{COLORS["red"]}">{below}</tspan>',
        )
        if rows != shown:
            yield Frame(now, rows)
            shown, last = rows, now
    os.waitpid(child, 0)
    final = (prompt, *(row(screen.buffer[k]) for k in range(ROWS)), rows[-1])
    yield Frame(time.monotonic() - began, final)


def picture(frames: list[Frame]) -> str:
    """Return the frames as one SVG, a strip that is moved past a window."""
    shift = frames[0].seconds
    end = frames[-1].seconds - shift + REST
    height = max(k + 1 for frame in frames for k, text in enumerate(frame.rows) if text) + 1
    w, h = COLUMNS * WIDTH + 24, height * HEIGHT + 24
    steps = "".join(
        f"{100 * (frame.seconds - shift) / end:.2f}%{{transform:translateY({-k * h:.0f}px)}}"
        for k, frame in enumerate(frames)
    )
    strip = "".join(
        f'<text y="{k * h + (number + 1) * HEIGHT + 8:.1f}">{text}</text>'
        for k, frame in enumerate(frames)
        for number, text in enumerate(frame.rows)
        if text
    )
    end_of_strip = f"animation:none;transform:translateY({-(len(frames) - 1) * h:.0f}px)"
    still = f"@media (prefers-reduced-motion){{.strip{{{end_of_strip}}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}">'
        f"<title>A worker is killed and comes back</title><style>"
        "text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}"
        f".strip{{animation:play {end:.1f}s step-end infinite}}"
        f"@keyframes play{{{steps}}}{still}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
        f'<g transform="translate(12 0)"><g class="strip">{strip}</g></g></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=250, help="of each worker")
    parser.add_argument("--kill-at", type=int, default=100, help="the step of the worker")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "kill.svg")
    args, model = parser.parse_known_args()  # all else is the script's
    with tempfile.TemporaryDirectory() as folder:
        frames = list(record(Path(folder), ["--steps", str(args.steps), *model], args.kill_at))
    args.out.write_text(picture(frames), "utf-8")
    print(f"{len(frames)} pictures, {frames[-1].seconds:.0f} s: {args.out}")


if __name__ == "__main__":
    main()
