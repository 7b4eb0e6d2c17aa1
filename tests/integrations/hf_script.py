"""An ordinary script with Hugging Face's Trainer, and what its tests look at afterwards."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import springline
from springline.integrations.huggingface import SpringlineCallback, local

ROWS, LENGTH, CODES = 64, 16, 32


class Rows(Dataset):
    """Random texts."""

    def __init__(self, rows=ROWS):
        random = torch.Generator().manual_seed(0)
        self.rows = torch.randint(CODES, (rows, LENGTH), generator=random)
        self.taken = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.taken.append(index)
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Watch(TrainerCallback):
    """Notes what a worker does, and kills it once."""

    def __init__(self, once=None, kill_at=None):
        self.rates, self.once, self.kill_at = {}, once, kill_at

    def on_train_begin(self, args, state, control, optimizer, **given):
        self.began = state.global_step
        self.moments = [int(value["step"]) for value in optimizer.state.values()]

    def on_step_end(self, args, state, control, lr_scheduler, **given):
        self.rates[state.global_step] = lr_scheduler.get_last_lr()[0]
        if state.global_step == self.kill_at and not self.once.exists():
            self.once.touch()
            Path(args.output_dir, f"checkpoint-{self.kill_at}").mkdir(parents=True)  # cut short
            os.kill(os.getpid(), signal.SIGKILL)


def network():
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    chances = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=CODES, **sizes, **chances, **ends)
    return GPT2LMHeadModel(config)


def arguments(directory, **changes):
    options = {
        "output_dir": str(directory),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**options | changes)


def trainer(directory, *callbacks, optimizers=(None, None), model=None, **changes):
    return Trainer(
        model=model or network(),
        args=arguments(directory, **changes),
        train_dataset=Rows(),
        eval_dataset=Rows(16),
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rule", default="average")
    parser.add_argument("--options", type=json.loads, default={"period": 3})
    parser.add_argument("--changes", type=json.loads, default={}, help="of TrainingArguments")
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args()
    if args.apart:
        local()
    args.out.mkdir(exist_ok=True)
    rank = springline.rank()
    mine = args.kill and args.kill[0] == rank
    watch = Watch(args.out / "killed", args.kill[1] if mine else None)
    callback = SpringlineCallback(args.rule, **args.options)
    work = trainer(args.out / "checkpoints", callback, watch, **args.changes)
    result = work.train(resume_from_checkpoint=args.resume)
    metrics = work.evaluate()
    work.save_model(str(args.out / "final"))
    center = callback.optimizer.worker.center
    found = {
        "began": watch.began,
        "ended": result.global_step,
        "eval_loss": metrics["eval_loss"],
        "rates": list(watch.rates.values()),
        "moments": watch.moments[:1],
        "main": work.is_world_process_zero(),
        "wrapped": type(work.model_wrapped).__name__,
        "version": center.version,
        "rows": work.train_dataset.taken,
    }
    (args.out / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
