"""A process that ends while one of its threads waits for an answer of an actor."""

import os
import subprocess
import sys
import threading

import pytest

from springline.center.ray_peer import Door, door
from springline.errors import EndedError

LEFT = "This process has left the Ray cluster"
# What was registered last comes first: the door is closed, it is said, and then Ray ends.
SCRIPT = """
import threading, time
import ray, atexit
atexit.register(print, "Ray ends", flush=True)
from springline.center import CenterError
from springline.center.ray_peer import RayPeer, connect
from springline.center.remote.peer import NotHereError

@ray.remote(num_cpus=0)
class Mute:
    def call(self, *_):
        time.sleep(100)

def wait():
    pending = peer.ask("ask")
    while True:
        try:
            pending.result(1.0)
        except NotHereError:
            print("no answer", flush=True)
        except CenterError as error:
            print(error, flush=True)
            return

connect()
peer = RayPeer("mute", "mute", Mute.remote(), "token")
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.slow
def test_ray_ends_when_nobody_waits_for_an_answer_any_more(cluster):
    command = (sys.executable, "-X", "faulthandler", "-c", SCRIPT)
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    first, *others = process.stdout.splitlines()
    assert first == "no answer"  # and only then:
    assert sorted(others) == ["Ray ends", f"{LEFT}. Start it again."]


def test_a_door_closes_when_all_are_out():
    door, entered, out = Door(lambda: True), threading.Event(), threading.Event()

    def stay():
        with door.inside(), door.inside():
            entered.set()
            out.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(10)
    assert not door.close(0.0)
    with pytest.raises(EndedError, match=LEFT), door.inside():
        pytest.fail("it is closed")
    assert not door.close(0.0)
    out.set()
    assert door.close()
    thread.join()


def test_nobody_is_let_in_without_a_cluster_behind():
    door = Door(lambda: False)
    with pytest.raises(EndedError, match=LEFT), door.inside():
        pytest.fail("there is nothing inside")
    assert door.close(0.0)


def test_who_was_inside_when_a_process_forked_is_not_waited_for_there():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "_connected", lambda: True)
        with door.inside():
            child = os.fork()
            if child == 0:
                os._exit(0 if door.close(0.0) else 1)
            assert os.waitpid(child, 0)[1] == 0
