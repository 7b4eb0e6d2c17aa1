"""Hugging Face's Trainer with springline, in one process."""

import pytest
import torch
from hf_script import Rows, Watch, network, trainer
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

import springline
from springline.integrations.huggingface import SpringlineCallback
from springline.integrations.huggingface_resume import complete
from springline.torch import DiLoCoOptimizer

SAVING = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 5}


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(ours, others):
    return all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


class AtStep(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self.step:
            self.call(control)


@pytest.mark.parametrize("rule", ["average", "elastic"])
def test_alone_it_is_plain_training_to_the_bit(tmp_path, rule):
    for name in ("plain", "ours"):
        (tmp_path / name / "resume").mkdir(parents=True)  # of the user's own
    plain = trainer(tmp_path / "plain", gradient_accumulation_steps=2, **SAVING)
    plain.train()
    callback = SpringlineCallback(rule, period=5)
    ours = trainer(tmp_path / "ours", callback, gradient_accumulation_steps=2, **SAVING)
    ours.train()
    assert same(weights(ours.model), weights(plain.model))
    assert callback.optimizer.worker.local_step == 12  # of 24 batches
    losses = [
        [line["eval_loss"] for line in t.state.log_history if "eval_loss" in line]
        for t in (plain, ours)
    ]
    assert losses[0] == losses[1]
    names = [sorted(p.name for p in (tmp_path / n).rglob("*")) for n in ("plain", "ours")]
    assert names[0] == names[1]


@pytest.mark.parametrize("rule", ["diloco", "average"])
def test_alone_it_resumes_to_the_bit_in_the_middle_of_a_period(tmp_path, rule):
    whole = trainer(tmp_path / "whole", SpringlineCallback(rule, period=5), **SAVING)
    whole.train()
    again = trainer(tmp_path / "again", SpringlineCallback(rule, period=5), **SAVING)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert again.state.global_step == 12
    assert same(weights(again.model), weights(whole.model))


def test_a_checkpoint_of_the_last_step_is_warned_of(tmp_path, caplog):
    trainer(tmp_path / "first", SpringlineCallback("diloco", period=5), **SAVING).train()
    again = trainer(tmp_path / "again", SpringlineCallback("diloco", period=5), **SAVING)
    assert "Nothing was trained" not in caplog.text
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-12"))
    assert "Nothing was trained: the checkpoint that this run begins with is of" in caplog.text


def test_evaluations_checkpoints_and_the_model_afterwards_are_of_the_center(tmp_path):
    seen = {}

    class Look(TrainerCallback):
        def on_evaluate(self, args, state, control, model, optimizer, **given):
            seen["evaluated"] = weights(model)

        def on_save(self, args, state, control, model, optimizer, **given):
            seen["center"] = optimizer.optimizer.worker.center.values()
            seen["step"] = state.global_step

    callback = SpringlineCallback("diloco", period=5)
    work = trainer(tmp_path, callback, Look(), max_steps=4, **SAVING | {"eval_steps": 4})
    work.train()
    # Four steps are no period: what is left over was exchanged before the last evaluation.
    center = callback.optimizer.worker.center.values()
    assert seen["step"] == 4
    for now in (seen["evaluated"], weights(work.model)):
        named = dict(zip(dict(work.model.named_parameters()), now, strict=True))
        assert all(torch.equal(named[name], torch.from_numpy(c)) for name, c in center.items())
    work.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-4", "final"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(saved[name], torch.from_numpy(c)) for name, c in center.items())


def test_a_checkpoint_in_the_middle_of_a_period_is_the_center(tmp_path):
    start = weights(network())
    callback = SpringlineCallback("diloco", period=10)
    work = trainer(tmp_path, callback, max_steps=6, save_strategy="steps", save_steps=3)
    work.train()
    model = network()
    model.load_state_dict(load_file(tmp_path / "checkpoint-3" / "model.safetensors"), strict=False)
    assert same(weights(model), start)  # nothing had been exchanged yet
    assert not same(weights(work.model), start)


def test_a_wrapped_optimizer_and_a_best_model(tmp_path):
    model = network()
    opt = DiLoCoOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model=model, period=2)
    early = EarlyStoppingCallback(early_stopping_patience=1)
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 40}
    work = trainer(
        tmp_path, SpringlineCallback(), early, optimizers=(opt, None), model=model, **options
    )
    work.train()
    assert work.state.global_step < 40
    center = {name: torch.from_numpy(c) for name, c in opt.worker.center.values().items()}
    best = load_file(tmp_path / f"checkpoint-{work.state.best_global_step}" / "model.safetensors")
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], best[name]) for name in center)
    assert not all(torch.equal(named[name], c) for name, c in center.items())  # it is not the last
    assert work.evaluate()["eval_loss"] == work.state.best_metric


def test_stop_ends_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr("springline.run._alone", {"stop": False})
    watch = Watch()
    work = trainer(
        tmp_path, AtStep(3, lambda control: springline.stop()), SpringlineCallback("average"), watch
    )
    assert work.train().global_step == 3


def test_bfloat16_and_a_schedule_on_a_plateau(tmp_path):
    options = {"bf16": True, "lr_scheduler_type": "reduce_lr_on_plateau"}
    callback = SpringlineCallback("elastic", period=2)
    work = trainer(tmp_path, callback, **options, eval_strategy="steps", eval_steps=2)
    assert work.train().global_step == callback.optimizer.worker.local_step == 12


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`rule` must be one of .* Received: rule='dilocco'"):
        SpringlineCallback("dilocco")
    with pytest.raises(ValueError, match="Received: period, and no rule"):
        SpringlineCallback(period=3)
    with pytest.raises(ValueError, match=r"Give the rule once.* rule=None and no wrapped"):
        trainer(tmp_path, SpringlineCallback())
    model = network()
    opt = DiLoCoOptimizer(torch.optim.AdamW(model.parameters()), model=model)
    with pytest.raises(ValueError, match=r"Give the rule once.* rule='average' and a wrapped"):
        trainer(tmp_path, SpringlineCallback("average"), optimizers=(opt, None), model=model)

    late = trainer(tmp_path)
    late.add_callback(SpringlineCallback("average"))
    with pytest.raises(TypeError, match="must be there when the Trainer is made"):
        late.train()

    callback = SpringlineCallback("average")
    twice = trainer(tmp_path, callback, max_steps=2)
    with pytest.raises(ValueError, match="is for one Trainer"):
        trainer(tmp_path, callback)
    twice.train()
    with pytest.raises(RuntimeError, match="has finished its training"):
        twice.train()


def test_the_rows_are_all_seen_alone(tmp_path):
    work = trainer(tmp_path, SpringlineCallback("average"), max_steps=16)
    work.train()
    assert sorted(work.train_dataset.taken[:64]) == list(range(len(Rows())))


def test_a_checkpoint_that_the_user_has_named_is_left_out(tmp_path):
    for name in ("checkpoint-9", "checkpoint-20", "checkpoint-best", "checkpoint-30-old"):
        (tmp_path / name).mkdir()
        TrainerState().save_to_json(str(tmp_path / name / "trainer_state.json"))
    (tmp_path / "checkpoint-40").mkdir()  # cut short
    assert complete(True, tmp_path, tmp_path) == str(tmp_path / "checkpoint-20")


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGLINE_RUN", str(tmp_path / "run"))
    work = trainer(tmp_path / "out", SpringlineCallback("average"))
    with pytest.raises((OSError, ValueError), match="checkpoint-7"):
        work.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
