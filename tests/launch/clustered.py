"""What the tests of `springline run --address` look at."""

import numpy as np
from launched import RunOnDisk

from springline import ElasticAverage
from springline.center import Layout
from springline.center.plan import Plan
from springline.launch_state import CenterStatus

PLAN = Plan.of(Layout.of({"w": np.zeros(1)}), ElasticAverage(), use_locking=True)


class ClusterRun(RunOnDisk):
    """What the directory of a run on a cluster tells."""

    @property
    def center(self):
        """What the center said of itself, as its launcher wrote it down."""
        return CenterStatus.read(self.path / "center")

    def steps(self):
        center = self.center
        return [steps for steps, _, _ in center.progress] if center else None
