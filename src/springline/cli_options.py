"""The arguments and options of the command line: their types, and their text in `--help`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_cluster_option = partial(typer.Option, rich_help_panel="Many machines")

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")]
RunsArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory of runs, or one run.")
]

# Of `springline run`.
Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="The script that every worker runs; with `-m`, a module."
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="The script's own arguments.", show_default=False),
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, run as with `python -m`.")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Number of workers; by default one per core, and on one machine at least two.",
        metavar="N",
    ),
]
ParameterServers = Annotated[
    int | None,
    typer.Option(
        help="TensorFlow: start a cluster with this many parameter servers; 0 for none.",
        metavar="N",
        show_default="0",
    ),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="A run to resume, or a directory for a new one."),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        metavar="K",
        help="Restarts per worker within the window; when a worker dies once more, the run ends. "
        "-1: no limit.",
    ),
]
RestartWindow = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Older restarts do not count."),
]
StartFrom = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Start a new run's center from this safetensors file, which has the model's own "
        "names. It overrides what the workers load.",
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Do not ask before a run goes on with another script.")
]
NoLive = Annotated[bool, typer.Option("--no-live", help="Print lines instead of the live screen.")]
Address = Annotated[
    str | None,
    _cluster_option(
        help="A Ray cluster that this machine is part of: `auto` or HOST:PORT.",
        metavar="RAY",
    ),
]
CenterShards = Annotated[
    int | None,
    _cluster_option(
        help="Number of shards of the center; by default one per machine, at least two, "
        "and fewer for a small model.",
        metavar="S",
    ),
]
Storage = Annotated[
    str | None,
    _cluster_option(
        help="Where the center's shards keep checkpoints: a directory that all machines see, "
        "or an fsspec URL; each run has a subdirectory of its own. By default it is in the run's "
        "directory. `none`: no checkpoints.",
        metavar="DIR",
    ),
]
Cpus = Annotated[
    float | None,
    _cluster_option(help="CPUs per worker.", metavar="C", show_default="1"),
]
Gpus = Annotated[
    float | None,
    _cluster_option(help="GPUs per worker.", metavar="G", show_default="0"),
]
WorkingDirectory = Annotated[
    Path | None,
    _cluster_option(
        help="Directory to copy to every machine, except runs/; SCRIPT runs from there.",
        metavar="DIR",
    ),
]
Env = Annotated[
    list[str] | None,
    _cluster_option(
        help="Send this environment variable to the workers, and no other; may be repeated.",
        metavar="NAME",
    ),
]
