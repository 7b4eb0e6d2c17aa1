"""Where the center lives."""

from springline.center.center import Center, Member, Progress
from springline.center.layout import Layout
from springline.center.local import Local
from springline.center.memory import LocalCenter
from springline.center.shared import SharedCenter
from springline.errors import (
    CenterError,
    CheckpointError,
    DamagedError,
    LayoutError,
    NonFiniteError,
    RankError,
    RoundTimeoutError,
    SettingsError,
)

__all__ = [
    "Center",
    "CenterError",
    "CheckpointError",
    "DamagedError",
    "Layout",
    "LayoutError",
    "Local",
    "LocalCenter",
    "Member",
    "NonFiniteError",
    "Progress",
    "RankError",
    "RoundTimeoutError",
    "SettingsError",
    "SharedCenter",
]
