"""The centers of a run's other optimizers, each with a keeper of its own.

RUN/center-NAME/               such a center and its checkpoints
RUN/center-NAME.safetensors    the same at the end of the run
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from springline.center import CenterError
from springline.center.directory import LAYOUT_NAME
from springline.launch.directory import CENTER, RunDirectory, short
from springline.launch.keeper import Keeper


class OtherKeepers:
    """Keeps all centers of a run but its own.

    Args:
        claim: the run's directory.
        say: prints what is lost, and where a center is at the end.
    """

    def __init__(self, claim: RunDirectory, say: Callable[[str], None]) -> None:
        self._claim, self._say = claim, say
        self._keepers: dict[str, Keeper] = {}
        self._begun = False  # whether workers may have made some

    def look(self) -> None:
        """Begin to keep the centers that are new."""
        for name in sorted({path.parent.name for path in self._layouts()} - self._keepers.keys()):

            def say(text: str, name: str = name) -> None:
                self._say(f"{name}: {text}")

            keeper = Keeper(self._claim, say, name, new=self._begun)
            keeper.start()
            self._keepers[name] = keeper
        self._begun = True

    def finish(self) -> bool:
        """Write the final centers when all workers are gone.

        Returns:
            Whether all are written and whole; what is not is reported.
        """
        whole = True
        try:
            self.look()
        except CenterError as error:
            whole = False
            self._say(str(error))
        for name, keeper in self._keepers.items():
            try:
                if final := keeper.finish():
                    version = "" if keeper.version is None else f" (version {keeper.version:,})"
                    self._say(f"{name} is in {short(final)}{version}.")
            except (CenterError, OSError) as error:
                whole = False
                self._say(f"{name}: {error}")
        return whole

    def _layouts(self) -> list[Path]:
        return list(self._claim.path.glob(f"{CENTER}-*/{LAYOUT_NAME}"))
