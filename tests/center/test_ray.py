"""The center on a real Ray cluster: what the contract, which runs there at length, leaves out."""

import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError

from marks import slow
from ray_cluster import actors_of, end_center
from recorded import gradient, rows, rule_of, schedule_of, start
from springline import ElasticAverage, Worker
from springline.center import (
    CenterError,
    CheckpointError,
    Layout,
    LayoutError,
    NonFiniteError,
    SettingsError,
)
from springline.center.ray import RayCenter, retire
from springline.center.ray_peer import RayPeer, door, shard_name
from springline.center.remote.peer import Call, PeerLostError
from springline.errors import EndedError, TokenError
from springline.rules.reference import Optimizer
from springline.torch import AGNOptimizer, ElasticAverageOptimizer

VALUES = {"w": np.arange(600_000, dtype=np.float32), "b": np.ones(3, np.float32)}
RULE = ElasticAverage(workers=2, period=1, moving_rate=0.25)


@pytest.fixture
def name(cluster):
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    end_center(name)


def make(name, rule=RULE, values=VALUES, **options):
    options = {"shards": 2, "token": name} | options
    return RayCenter.create_or_join(name, Layout.of(values), rule, values, **options)


def test_a_process_that_has_left_the_cluster_does_not_join_it_anew(name, monkeypatch):
    """Its threads may outlive the connection when the interpreter is about to end."""
    worker = Worker(VALUES, RULE, make(name), 0)
    head = worker.center.head
    with monkeypatch.context() as patch:
        patch.setattr(door, "_connected", lambda: False)
        for call in (head.ask, head.tell):
            with pytest.raises(EndedError, match="This process has left the Ray cluster"):
                call("look")
        deadline = time.monotonic() + 10
        while any(thread.name == "springline heartbeat" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with pytest.raises(EndedError, match="This process has left the Ray cluster"):
        worker.exchange()


@pytest.mark.parametrize("run", ["elastic-momentum-rho", "agn-momentum"])
def test_it_follows_what_was_recorded(name, run):
    rule, inner = rule_of(run)
    workers = [
        Worker(start(), rule, make(name, rule, start()), rank) for rank in range(rule.workers)
    ]
    inners = [Optimizer(inner) for _ in workers]
    _, *others = rows(run)
    for ranks, row in zip(schedule_of(run), others, strict=True):
        for rank in [ranks] if isinstance(ranks, int) else ranks:
            worker = workers[rank]
            gradients = gradient(rank, worker.local_step, worker.parameters)
            worker.observe(gradients)
            inners[rank].step(worker.parameters, gradients)
            worker.step()
        for entry in row:
            center = workers[0].center.values()
            for key, x in workers[entry["worker"]].parameters.items():
                np.testing.assert_allclose(x, entry["local"][key], rtol=0, atol=2e-5)
                np.testing.assert_allclose(center[key], entry["center"][key], rtol=0, atol=2e-5)
    for worker in workers:
        worker.member.leave()


def test_a_center_that_was_made_before_is_not_made_anew(name):
    with pytest.raises(EndedError, match=rf"The center '{name}' is gone, and had no storage: th"):
        make(name, join=True)
    wait_until_gone(name)
    make(name)
    assert make(name, join=True).version == 0


def test_who_has_no_token_gets_nothing_and_who_calls_wrongly_changes_nothing(name):
    center = make(name, token=None)  # its maker hands it on
    words = r"without the token of this center.*`token=center\.token`"
    for token in (None, "another"):
        for call in (RayCenter.open, make, retire):
            with pytest.raises(TokenError, match=words):
                call(name, token=token)
    for actor in actors_of(name).values():
        assert not {"look", "join", "exchange", "save"} & set(dir(actor))  # but for `call`
        with pytest.raises(TokenError, match=words):
            ray.get(actor.call.remote("another", "save"))

    one = Worker(VALUES, RULE, RayCenter.open(name, token=center.token), 0)
    message, *_ = one.member.messages(one.member._blocks_of(one.local))
    with pytest.raises(LayoutError, match=r"of uint8. Received: an array of shape"):
        Call(center.shards[0], "exchange", replace(message, data=message.data[:-4])).result()
    other = ElasticAverage(workers=3, period=1, moving_rate=0.25)
    with pytest.raises(SettingsError, match="workers=2, this worker comes with workers=3"):
        Call(center.head, "make_shards", other).result()
    one.parameters["b"] += 4
    one.exchange()
    np.testing.assert_array_equal(center.values()["b"], 2)
    assert center.version == 1
    one.member.leave()


def test_shards_are_spread_over_the_machines(name):
    make(name, shards=4).close()
    assert len(where_shards_are(name)) == 2


def test_shards_are_on_the_machines_that_are_for_them(cluster, name):
    cluster.add("springline-center")
    try:
        make(name, shards=None).close()
        (where,) = where_shards_are(name)
        (meant,) = (n["NodeID"] for n in ray.nodes() if "springline-center" in n["Resources"])
        assert where == meant
    finally:
        end_center(name)
        cluster.remove("springline-center")
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        assert not any("springline-center" in resources for resources in alive)


def where_shards_are(name):
    return {
        ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
        for key, actor in actors_of(name).items()
        if key != "head"
    }


MAKE_A_HEAD = """
import sys
from springline.center.ray_actors import HeadActor, make_actor
from springline.center.ray_peer import connect, head_name, ray

address, name = sys.argv[1:]
connect(address)
about = name, name, None, 10.0, 600.0
head = make_actor(HeadActor, head_name(name), {"max_concurrency": 10}, *about)
ray.get(head.call.remote(name, "look"))
"""


def test_all_actors_are_of_one_job(name, cluster):
    """Else Ray may forget the head's class when a machine was cut off and comes back."""
    subprocess.run([sys.executable, "-c", MAKE_A_HEAD, cluster.address, name], check=True)
    make(name, shards=2)
    jobs = {
        ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_job_id()))
        for actor in actors_of(name).values()
    }
    assert len(jobs) == 1
    assert jobs != {ray.get_runtime_context().get_job_id()}


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU())


def train(model, optimizer, steps=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [ElasticAverageOptimizer, *slow(AGNOptimizer)])
def test_a_torch_script_gives_the_same_as_on_its_own_center(name, kind):
    """AGN's outer optimizer is torch's own AdamW, in the actors."""

    def wrapped(model, center=None):
        inner = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        return kind(inner, model=model, period=2, center=center)

    alone = net()
    expected = train(alone, wrapped(alone))
    model = net()
    first = wrapped(net())
    layout, rule = first.worker.layout, first.worker.rule
    values = first.worker.center.values()
    center = RayCenter.create_or_join(name, layout, rule, values, shards=3)
    optimizer = wrapped(model, center)
    found = train(model, optimizer)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    optimizer.finish()


def test_an_exchange_in_the_background(name):
    model = net()
    inner = torch.optim.SGD(model.named_parameters(), lr=0.01)
    rule = ElasticAverage(period=1)
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    buffers = {n: b.numpy() for n, b in model.named_buffers() if b.is_floating_point()}
    layout = Layout.of(values, buffers)
    center = RayCenter.create_or_join(name, layout, rule, values | buffers)
    optimizer = ElasticAverageOptimizer(inner, model=model, period=1, overlap=True, center=center)
    train(model, optimizer)
    optimizer.wait()
    assert center.version >= 1
    optimizer.finish()
    assert center.members() == []


def wait_until_gone(name):
    deadline = time.monotonic() + 60
    while actors_of(name):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_center_that_nobody_uses_saves_itself_and_goes_on_later(name, tmp_path):
    storage = str(tmp_path / "store")
    center = make(name, storage=storage, linger=1.0)
    worker = Worker(VALUES, RULE, center, 0)
    worker.parameters["b"] += 4
    worker.exchange()
    worker.member.leave()
    wait_until_gone(name)
    other = ElasticAverage(workers=2, period=1, moving_rate=0.5)
    with pytest.raises(SettingsError, match=r"moving_rate=0.25, this worker comes with"):
        make(name, other, storage=storage)
    assert set(actors_of(name)) == {"head"}  # no shard with the wrong rule
    again = make(name, storage=storage)
    np.testing.assert_array_equal(again.values()["b"], 2)
    assert again.version == 1
    assert Worker(VALUES, RULE, again, 0).start_step == 0
    again.retire()
    with pytest.raises(CenterError, match="There is no center"):
        RayCenter.open(name, token=name)


def test_a_storage_that_cannot_be_written_is_said_and_nothing_stays(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Cannot use .*/file/here for the center's check"):
        make(name, storage=str(tmp_path / "file" / "here"))
    wait_until_gone(name)


@pytest.mark.slow
def test_a_second_attempt_has_a_storage_of_its_own(name, tmp_path):
    """The head of the first one would write to the first one's."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with pytest.raises(NonFiniteError):
        make(name, values=VALUES | {"b": np.full(3, np.nan, np.float32)}, storage=first)
    wait_until_gone(name)
    make(name, storage=second).retire()
    np.testing.assert_array_equal(make(name, storage=second).values()["b"], 1)


def test_another_storage_than_the_centers_is_refused(name, tmp_path):
    make(name)
    with pytest.raises(CenterError, match=r"has no storage; this worker was given"):
        make(name, storage=str(tmp_path))


@pytest.mark.slow
def test_a_storage_that_machines_do_not_share_is_refused(name):
    with pytest.raises(CenterError, match=r"is not the same on all machines: what shard-0 of the "):
        make(name, storage="memory://every-process-has-its-own")
    wait_until_gone(name)


def test_an_actor_of_the_same_name_is_not_the_one_that_is_gone(name):
    make(name, shards=2)
    actors = actors_of(name)
    one = RayPeer("shard 0", shard_name(name, 0), actors["shard-0"], name)
    other = RayPeer("shard 0", shard_name(name, 0), actors["shard-1"], name)
    assert isinstance(one.lost(RayActorError()), PeerLostError)
    assert isinstance(other.lost(RayActorError()), EndedError)


def test_more_shards_than_memory_are_refused(name):
    large = {"w": np.zeros(40_000_000, np.float32)}
    with pytest.raises(CenterError, match=r"100000 shards needs about .* GB of memory; the mach"):
        make(name, values=large, shards=100_000)


def test_no_cluster_is_said_within_seconds():
    script = "from springline.center.ray import connect; connect('127.0.0.1:1')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (
        "There is no Ray cluster at 127.0.0.1:1. Start one with `ray start --head`" in done.stderr
    )


def test_without_ray_the_extra_is_named():
    script = "import sys; sys.modules['ray'] = None; import springline.center.ray"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "pip install springline[ray]" in done.stderr
