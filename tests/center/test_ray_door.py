"""A process that leaves a cluster, or ends, while one of its threads waits for an answer."""

import subprocess
import sys
import threading

import pytest

from springline.center.errors import EndedError
from springline.center.ray_door import Door

# What was registered first comes last: Ray is gone by then, and threads still run.
SCRIPT = """
import atexit, sys, threading, time
atexit.register(time.sleep, 1)

import ray
from springline.center import CenterError
from springline.center.ray_peer import RayPeer, connect, leave
from springline.center.served.peer import NotHereError

@ray.remote(num_cpus=0)
class Mute:
    def ask(self):
        time.sleep(100)

def wait():
    pending = peer.ask("ask")
    while True:
        try:
            pending.result(0.5)
        except NotHereError:
            continue
        except CenterError as error:
            print(error, flush=True)
            return

connect()
peer = RayPeer("mute", "mute", Mute.remote())
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.2)
if sys.argv[1] == "leaves":
    leave()
"""


@pytest.mark.parametrize("what", ["ends", "leaves"])
def test_a_process_ends_right_while_its_thread_waits_for_an_answer(cluster, what):
    command = (sys.executable, "-X", "faulthandler", "-c", SCRIPT, what)
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "This process has left the Ray cluster. Start it again.\n"


def test_a_door_closes_when_all_are_out():
    door, entered, out = Door(lambda: True), threading.Event(), threading.Event()

    def stay():
        with door.inside():
            entered.set()
            out.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait(10)
    assert not door.close(0.0)
    with pytest.raises(EndedError, match="has left the Ray cluster"), door.inside():
        pytest.fail("it is closed")
    out.set()
    assert door.close()
    thread.join()
    door.open()
    with door.inside():
        assert not door.close(0.0)
    assert door.close(0.0)


def test_nobody_is_let_in_without_a_cluster_behind():
    door = Door(lambda: False)
    with pytest.raises(EndedError), door.inside():
        pytest.fail("there is nothing inside")
    assert door.close(0.0)


def test_who_was_inside_when_a_process_forked_is_not_waited_for_there():
    door = Door(lambda: True)
    with door.inside():
        door.renew()
        assert door.close(0.0)
        door.renew()
