"""The faults: each is a run with one, which has to end right.

    ray_drill.py --list              # what there is
    ray_drill.py [FAULT/RULE ...]    # these, or all

The hosts are its own. It prints each outcome in JSON.
"""

import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ray_checks import FOREIGN, Outcome, check, mean
from ray_machines import (
    MisplacedError,
    all_killed,
    link_cut,
    link_down,
    node_killed,
    power_lost,
    power_lost_quick,
)
from ray_scene import Scene
from safetensors.numpy import load_file

SOONER = {  # how Ray finds out that a machine is dead
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
STOPPED = 30.0  # seconds
ATTEMPTS = 5  # at a center of which a part is where the fault hits it


def worker_killed(scene):
    """A worker is killed in the middle of an exchange, and started again."""
    scene.begin()
    while True:
        scene.signal(1, signal.SIGSTOP)
        if scene.log(1).busy:
            break
        scene.signal(1, signal.SIGCONT)
    scene.fault()
    scene.signal(1, signal.SIGKILL)
    scene.start(1, first=FOREIGN)
    scene.exchange([0])
    scene.wait(lambda: len(scene.log(1).born) == 2, "rank 1 to be back")
    steps, found = scene.finish()
    lost = check(scene, steps, found, interrupted=[1])
    return Outcome.of(scene, "a worker killed in an exchange", [0], lost)


def shard_killed(scene):
    """A shard's process is killed: it goes on from its last checkpoint."""
    scene.begin()
    scene.wait(lambda: min(scene.kept(1)) > 0, "a checkpoint of shard 1")
    process, address = scene.ask("actors")["shard-1"]
    scene.fault()
    kept = scene.kept(1)
    scene.host_at(address).signal(process, signal.SIGKILL)
    done = scene.done()
    scene.exchange()
    assert scene.ask("actors")["shard-1"][0] != process
    steps, found = scene.finish()
    lost = check(scene, steps, found, {1: done - kept})
    return Outcome.of(scene, "a shard's process killed", range(scene.workers), lost)


def head_killed(scene):
    """The head's process is killed: it asks the shards where everybody is."""
    scene.begin()
    process, address = scene.ask("actors")["head"]
    scene.fault()
    scene.host_at(address).signal(process, signal.SIGKILL)
    scene.exchange()
    everybody = list(range(scene.workers))
    scene.wait(lambda: scene.ask("center")["members"] == everybody, "all to be members again")
    assert scene.ask("actors")["head"][0] != process
    steps, found = scene.finish()
    return Outcome.of(scene, "the head's process killed", everybody, check(scene, steps, found))


def worker_stopped(scene):
    """A worker is stopped for thirty seconds; the others go on."""
    scene.begin()
    last = scene.workers - 1
    others = range(last)
    scene.fault()
    scene.signal(last, signal.SIGSTOP)
    scene.pass_by(STOPPED)
    alone = [scene.log(rank).values[-1] for rank in others]
    scene.signal(last, signal.SIGCONT)
    scene.exchange()
    if scene.rule == "average":
        assert alone == [mean(others)] * last, alone
        scene.wait(
            lambda: scene.log(0).values[-1] == mean(range(scene.workers)),
            "a round of all workers",
        )
    steps, found = scene.finish()
    lost = check(scene, steps, found)
    return Outcome.of(scene, f"a worker stopped for {STOPPED:.0f} s", others, lost)


def late_joiner(scene):
    """A worker comes late: it takes the center, and does not give it."""
    last = scene.workers - 1
    scene.begin(range(last))
    scene.fault()
    scene.start(last, first=FOREIGN)
    scene.wait(lambda: scene.log(last).born, "the late one")
    assert min(scene.log(last).born[0].values) > 0, scene.log(last).born
    scene.exchange()
    steps, found = scene.finish()
    return Outcome.of(scene, "a worker joins late", range(last), check(scene, steps, found))


def driver_killed(scene):
    """`springline run` is killed, and started again: the center has stayed where it was."""
    driver = scene.drive()
    scene.exchange(range(scene.workers))
    scene.fault()
    scene.hosts[0].end(driver)
    driver = scene.drive()
    scene.wait(lambda: all(len(log.born) == 2 for log in scene.logs()), "all to be back")
    scene.exchange(range(scene.workers))
    steps = scene.set_steps()
    scene.wait(lambda: driver.poll() is not None, "the end of the run")
    assert driver.returncode == 0, (scene.home / "driver.err").read_text()
    center = load_file(scene.home / "run" / "center.safetensors")
    found = {"shards": [[float(w.min()), float(w.max())] for w in center.values()]}
    lost = check(scene, steps, found, interrupted=range(scene.workers))
    return Outcome.of(scene, "`springline run` killed and started again", range(2), lost)


CASES = {
    "worker/agn": (worker_killed, {}),
    "worker/elastic": (worker_killed, {}),
    "shard/agn": (shard_killed, {}),
    "shard/elastic": (shard_killed, {}),
    "shard/average": (shard_killed, {}),
    "head/agn": (head_killed, {}),
    "head/average": (head_killed, {}),
    "node/agn": (node_killed, {"workers": 3, "shards": 4}),
    "power/agn": (power_lost, {"workers": 3, "shards": 4}),
    "power-quick/agn": (power_lost_quick, {"workers": 3, "shards": 4}),
    "link/agn": (link_down, {}),
    "link/elastic": (link_down, {}),
    "cut/agn": (link_cut, {"workers": 3, "shards": 4}),
    "stopped/agn": (worker_stopped, {}),
    "stopped/elastic": (worker_stopped, {}),
    "stopped/average": (worker_stopped, {"workers": 3}),
    "late/agn": (late_joiner, {"workers": 3}),
    "all/agn": (all_killed, {}),
    "driver/agn": (driver_killed, {}),
}


def drill(case, home, hosts, **options):
    """Make one run with a fault."""
    fault, own = CASES[case]
    sooner = fault in (power_lost_quick, link_cut)
    if sooner:
        hosts.restart(**SOONER)
    for attempt in range(ATTEMPTS):
        place = home / f"{home.name}-{attempt}"
        place.mkdir()
        try:
            with Scene(place, hosts, case.split("/")[1], **(own | options)) as scene:
                outcome = fault(scene)
            break
        except MisplacedError:
            if attempt + 1 == ATTEMPTS:
                raise
    if sooner:
        hosts.restart()
    return outcome


def main(cases):
    sys.path.append(str(Path(__file__).parents[1]))
    from hosts import Hosts

    with Hosts() as hosts:
        for case in cases or CASES:
            try:
                with tempfile.TemporaryDirectory() as home:
                    found = asdict(drill(case, Path(home), hosts))
            except AssertionError as error:
                print(error, file=sys.stderr)
                found = {"error": str(error).splitlines()[0]}
                hosts.restart()
            print(json.dumps({"case": case} | found), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*CASES, sep="\n")
    else:
        main(sys.argv[1:])
