"""A small GPT learns to write like Shakespeare, one character at a time.

    springline run --workers 2 examples/shakespeare.py     two workers and their center
    python examples/shakespeare.py                         one worker alone

Every worker trains its own copy of the model on its own random batches. What is evaluated, sampled
from and saved at the end is their center.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from data import DataError, tiny_shakespeare
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import springline
from springline import outer
from springline.torch import (
    AGNOptimizer,
    AsyncDiLoCoOptimizer,
    DiLoCoOptimizer,
    ElasticAverageOptimizer,
    ModelAverageOptimizer,
    SlowMoOptimizer,
)
from springline.torch.optimizer import CenterOptimizer

LOG_EVERY = 10  # steps
EVALUATE_EVERY = 50  # steps
PART = 18  # one window in so many of the held-out text, for the curve of val_loss
WARM_UP = 0.05  # of all steps
SAMPLE = 400  # characters to write at the end


class Block(nn.Module):
    """Attention to what came before, then a small network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        qkv = self.attention(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in qkv)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """Guesses the next character at every place of a text."""

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(characters, width)  # also the last layer's weights
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.characters.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean nats per character; the first of each window is given."""
        guesses = self(windows[:, :-1])
        return F.cross_entropy(guesses.flatten(0, 1), windows[:, 1:].flatten())


def wrap(optimizer: torch.optim.Optimizer, model: GPT, args: argparse.Namespace) -> CenterOptimizer:
    """The one line of a training script that springline changes."""
    if args.rule == "average":
        return ModelAverageOptimizer(optimizer, model=model, period=args.period)
    if args.rule == "agn":
        return AGNOptimizer(optimizer, model=model, period=args.period)
    if args.rule == "slowmo":
        return SlowMoOptimizer(optimizer, model=model, period=args.period)
    if args.rule == "diloco":
        chosen = outer.Nesterov(*args.outer) if args.outer else None
        return DiLoCoOptimizer(optimizer, model=model, period=args.period, outer=chosen)
    if args.rule == "async_diloco":
        delayed = outer.DelayedNesterov(*args.outer) if args.outer else None
        return AsyncDiLoCoOptimizer(optimizer, model=model, period=args.period, outer=delayed)
    return ElasticAverageOptimizer(
        optimizer, model=model, period=args.period, moving_rate=args.moving_rate
    )


def rate(step: int, args: argparse.Namespace) -> float:
    """Up to the peak in a straight line, then down to a tenth of it along a cosine."""
    warm_up = max(1, round(WARM_UP * args.steps))
    if step < warm_up:
        return float(args.lr * (step + 1) / warm_up)
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * done)))


def batch(text: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Random windows of this step of this worker, whether or not it was restarted meanwhile."""
    random = np.random.default_rng([args.seed, springline.rank(), step])
    starts = torch.from_numpy(random.integers(len(text) - args.context, size=(args.batch, 1)))
    return text[starts + torch.arange(args.context + 1)]


def train(
    model: GPT, opt: CenterOptimizer, text: Tensor, held_out: Tensor, args: argparse.Namespace
) -> None:
    for step in springline.steps(args.steps):
        for group in opt.param_groups:
            group["lr"] = rate(step, args)
        loss = model.loss(batch(text, step, args))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % LOG_EVERY == 0:
            springline.log(loss=loss.item())
        if step % EVALUATE_EVERY == 0 and springline.rank() == 0:
            with opt.center_weights():
                springline.log(val_loss=evaluate(model, held_out[::PART]))


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor) -> float:
    losses = [model.loss(part) * len(part) for part in torch.split(windows, 32)]
    return torch.stack(losses).sum().item() / len(windows)


@torch.no_grad()
def sample(model: GPT, characters: str, seed: int) -> str:
    """Text from the model, begun with a new line."""
    random = torch.Generator().manual_seed(seed)
    text = torch.full((1, 1), characters.index("\n"))
    for _ in range(SAMPLE):
        guess = model(text[:, -model.context :])[:, -1] / 0.8  # a little surer than it is
        text = torch.cat([text, torch.multinomial(guess.softmax(-1), 1, generator=random)], 1)
    return "".join(characters[i] for i in text[0]).strip()


def report(model: GPT, opt: CenterOptimizer, held_out: Tensor, characters: str, seed: int) -> str:
    """Save the center; return what it has become and what it took."""
    directory = springline.directory() or Path("runs/alone")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    opt.save_center(directory / "center.safetensors")
    with opt.center_weights():
        springline.log(val_loss=evaluate(model, held_out[::PART]))
        loss = evaluate(model, held_out)
        text = sample(model, characters, seed)
    lines = [
        f"The center writes:\n\n{text}\n",
        f"Validation loss of the center: {loss:.4f} nats per character of held-out text",
    ]
    if springline.workers() > 1:
        ranks = opt.worker.center.progress()
        there_and_back = 2 * opt.worker.layout.nbytes  # parameters; or gradients and their mean
        exchanged = there_and_back * sum(rank.exchanges for rank in ranks)
        every_step = there_and_back * sum(rank.steps for rank in ranks)
        lines += [
            f"Bytes exchanged: {exchanged:,}",
            f"Bytes that synchronous data parallel would have sent: {every_step:,}",
        ]
    lines += [f"The center is in {directory / 'center.safetensors'}"]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    rules = ["elastic", "average", "agn", "diloco", "async_diloco", "slowmo"]
    add("--rule", choices=rules, default="average")
    add("--period", type=int, default=10, help="τ, local steps between two exchanges")
    add("--moving-rate", type=float, help="α of elastic averaging; default: 0.9 / workers")
    rates = ("RATE", "MOMENTUM")
    add("--outer", type=float, nargs=2, metavar=rates, help="DiLoCo's outer optimizer")
    add("--steps", type=int, default=1000, help="of each worker")
    add("--lr", type=float, default=4e-3, help="the learning rate's peak")
    add("--batch", type=int, default=12, help="windows in a step")
    add("--seed", type=int, default=0)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--context", type=int, default=64, help="characters that the model looks back")
    args = parser.parse_args()
    if args.moving_rate is not None and args.rule != "elastic":
        parser.error("--moving-rate is for --rule elastic")
    if args.outer is not None and "diloco" not in args.rule:
        parser.error("--outer is for --rule diloco and async_diloco")
    return args


def main() -> None:
    args = arguments()
    try:
        text = tiny_shakespeare()
    except DataError as error:
        raise SystemExit(str(error)) from error
    characters = "".join(sorted(set(text)))
    code = {character: i for i, character in enumerate(characters)}
    codes = torch.tensor([code[character] for character in text])
    tenth = len(codes) // 10
    held_out = codes[-tenth:].unfold(0, args.context + 1, args.context)

    torch.manual_seed(args.seed)
    model = GPT(len(characters), args.context, args.width, args.layers, args.heads)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    opt = wrap(adamw, model, args)
    train(model, opt, codes[:-tenth], held_out, args)
    if opt.final():
        springline.report(report(model, opt, held_out, characters, args.seed))


if __name__ == "__main__":
    main()
