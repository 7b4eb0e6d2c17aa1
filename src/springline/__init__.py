"""springline trains one model on many loosely coupled workers.

Each worker keeps its own parameters and its own optimizer and, every few steps, exchanges with a
shared center that pulls it back like a mooring line.
"""

from springline import mistakes, outer, schedule
from springline.center import LocalCenter, SharedCenter
from springline.data import epochs
from springline.errors import (
    CenterError,
    CheckpointError,
    DamagedError,
    EndedError,
    FinishedError,
    LayoutError,
    NonFiniteError,
    RankError,
    RoundTimeoutError,
    SettingsError,
    TakenOverError,
    TokenError,
)
from springline.progress import log, report, start_step, steps
from springline.rules import AGN, AsyncDiLoCo, DiLoCo, ElasticAverage, ModelAverage, SlowMo
from springline.run import directory, rank, stop, stopping, workers
from springline.worker import Worker

mistakes.watch()
__version__ = "0.1.0"
__all__ = [
    "AGN",
    "AsyncDiLoCo",
    "CenterError",
    "CheckpointError",
    "DamagedError",
    "DiLoCo",
    "ElasticAverage",
    "EndedError",
    "FinishedError",
    "LayoutError",
    "LocalCenter",
    "ModelAverage",
    "NonFiniteError",
    "RankError",
    "RoundTimeoutError",
    "SettingsError",
    "SharedCenter",
    "SlowMo",
    "TakenOverError",
    "TokenError",
    "Worker",
    "directory",
    "epochs",
    "log",
    "outer",
    "rank",
    "report",
    "schedule",
    "start_step",
    "steps",
    "stop",
    "stopping",
    "workers",
]
