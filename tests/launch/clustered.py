"""What the tests of `springline run --address` look at."""

from launched import RunOnDisk

from springline.launch.state import CenterStatus


class ClusterRun(RunOnDisk):
    """What the directory of a run on a cluster tells."""

    @property
    def center(self):
        """What the center said of itself, as its launcher wrote it down."""
        return CenterStatus.read(self.path / "center")

    def steps(self):
        center = self.center
        return [steps for steps, _, _ in center.progress] if center else None
