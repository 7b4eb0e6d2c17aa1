"""What the optimizers are given: wrong input is refused by name, and nothing has begun."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch_training import INNERS, OPTIMIZERS, RULES, network, train, wrap

import springline.torch
from springline.torch import ElasticAverageOptimizer


def sgd(model):
    return INNERS["sgd"](model.parameters())


@pytest.mark.parametrize("rule", RULES)
def test_an_address_is_no_directory(rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'ray://head:10001'.*springline run --address"):
        wrap(rule, sgd(network()), center="ray://head:10001")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["use_locking", "synchronous", "overlap"])
def test_a_word_is_not_true_or_false(name, directory):
    with pytest.raises(TypeError, match=rf"`{name}` must be True or False.*{name}='False'"):
        wrap("elastic", sgd(network()), center=directory, **{name: "False"})
    assert not directory.exists()


@pytest.mark.parametrize(
    ("name", "value"), [("moving_rate", "0.1"), ("rho", "0"), ("rho", None), ("timeout", "5")]
)
def test_numbers_are_numbers(name, value, directory):
    with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: "):
        wrap("elastic", sgd(network()), center=directory, **{name: value})
    assert not directory.exists()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("period", ["10", 2.5, None, True])
def test_a_period_is_an_integer(rule, period):
    with pytest.raises(ValueError, match=rf"must be an integer >= 1.*Received: \w+={period!r}"):
        wrap(rule, sgd(network()), period)


@pytest.mark.parametrize("rule", RULES)
def test_an_optimizer_is_wrapped_once(rule):
    once = wrap(rule, sgd(network()))
    with pytest.raises(TypeError, match=rf"{type(once).__name__}.* is wrapped already"):
        ElasticAverageOptimizer(once)


def meta():
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, device="meta"))


def lazy():
    return nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(2))


def sparse():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[1].weight = nn.Parameter(torch.eye(2, 5).to_sparse())
    return model


class Wrapped(torch.Tensor):
    """A tensor made of others, as `DTensor` is."""

    def __tensor_flatten__(self):
        return [], None


def subclass():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[1].weight = nn.Parameter(torch.ones(2, 5).as_subclass(Wrapped))
    return model


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (meta, r"'1.weight' is on the meta device.*`to_empty`"),
        (lazy, r"'1.weight' has no shape yet.*batch through the model"),
        (sparse, r"'1.weight' is sparse.*`to_dense\(\)`"),
        (subclass, r"'1.weight' \(.*DTensor.*not supported"),
    ],
)
def test_a_parameter_without_plain_values_is_refused_by_name(rule, make, words):
    model = make()
    with pytest.raises(ValueError, match=words):
        wrap(rule, sgd(model), model=model)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_a_sharded_parameter_is_refused_by_name(tmp_path):
    from torch import distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model = network()
        fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match=r"'0.weight' \(DTensor\) is sharded"):
            wrap("elastic", sgd(model), model=model)
        for original in (True, False):
            model = FullyShardedDataParallel(
                network(), use_orig_params=original, device_id=torch.device("cpu")
            )
            name = "0.weight" if original else "_flat_param"
            with pytest.raises(ValueError, match=rf"{name}' \(Parameter\) is sharded.*FSDP"):
                wrap("elastic", sgd(model), model=model)
    finally:
        dist.destroy_process_group()


def test_a_buffer_without_values_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    model[1].running_mean = torch.empty(5, device="meta")
    with pytest.raises(ValueError, match=r"'1.running_mean' is on the meta device"):
        wrap("elastic", sgd(model), model=model)


def test_a_lazy_model_trains_after_a_forward_pass():
    model = lazy()
    model(torch.zeros(1, 4))
    train(model, wrap("elastic", sgd(model), model=model), range(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_is_not_copied(copied):
    model = network()
    opt = wrap("elastic", sgd(model), model=model)
    with pytest.raises(TypeError, match=r"ElasticAverageOptimizer .*`state_dict\(\)`"):
        copied(opt)
    train(model, opt, range(3))


@pytest.fixture
def run(directory, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(directory))
    monkeypatch.setenv("SPRINGLINE_WORKERS", "2")
    monkeypatch.setenv("SPRINGLINE_RANK", "1")
    return directory


def test_an_optimizer_after_a_finished_one_may_have_its_center(run):
    model = network()
    for version in (1, 2):
        opt = wrap("elastic", sgd(model), 5, model=model)
        train(model, opt, range(2))
        opt.finish()
        assert opt.worker.center.version == version


def test_on_a_cluster_a_script_has_one_center(run, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SPRINGLINE_CENTER", "digits")
    monkeypatch.setenv("SPRINGLINE_TOKEN", "theirs")
    with pytest.raises(ValueError, match=r"is this worker's own.*Leave `center` out"):
        wrap("elastic", sgd(network()), center=run / "second")
    assert not run.exists()


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_by_its_name(rule):
    model = network()
    opt = springline.torch.wrap(rule, sgd(model), model=model, period=2)
    assert type(opt) is OPTIMIZERS[rule]
    train(model, opt, range(3))


@pytest.mark.parametrize("rule", ["Elastic", "", None, 3])
def test_an_unknown_rule_gets_the_names(rule):
    names = '"elastic", "average", "agn", "diloco", "async_diloco", "slowmo"'
    with pytest.raises(
        ValueError, match=rf"`rule` must be one of {names}. Received: rule={rule!r}"
    ):
        springline.torch.wrap(rule, sgd(network()))
