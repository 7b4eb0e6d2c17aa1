"""Hugging Face's Trainer: a small GPT-2, made from scratch, learns Shakespeare's characters.

    python examples/huggingface_gpt2.py                          one worker alone
    springline run --workers 2 examples/huggingface_gpt2.py      two workers and their center

One callback is all. Each worker trains on its own part of the text; what is evaluated, and saved in
`--out`, is the center. A worker that is killed goes on from its own last checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from data import tiny_shakespeare
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import springline
from springline.integrations.huggingface import SpringlineCallback, local

CONTEXT = 64


class Windows(Dataset[dict[str, Tensor]]):
    """Pieces of a text, one after the other."""

    def __init__(self, codes: Tensor) -> None:
        self.rows = codes.unfold(0, CONTEXT, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500, help="of each worker")
    parser.add_argument("--out", default="runs/huggingface")
    args = parser.parse_args()
    local()  # under torchrun: the Trainer would use DistributedDataParallel

    text = tiny_shakespeare()
    characters = sorted(set(text))
    code = {character: i for i, character in enumerate(characters)}
    codes = torch.tensor([code[character] for character in text])
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(characters),
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=f"{args.out}/checkpoints",
            max_steps=args.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=100,
            save_steps=100,
            save_total_limit=2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Windows(codes[:-50_000]),
        eval_dataset=Windows(codes[-50_000:]),
        callbacks=[SpringlineCallback("diloco", period=50)],  # the line that springline adds
    )
    trainer.train(resume_from_checkpoint=springline.directory() is not None)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{args.out}/final")
    springline.report(f"Validation loss of the center: {loss:.4f}")


if __name__ == "__main__":
    main()
