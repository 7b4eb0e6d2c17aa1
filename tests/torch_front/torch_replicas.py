"""A training script for `torchrun`: with DDP, the same data on all ranks, or as it should be."""

import functools
import sys

import torch
import torch.distributed as dist

import springline
from springline.torch import DiLoCoOptimizer, ModelAverageOptimizer


def main(how: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(net.named_parameters(), lr=0.1)
    if how == "same":
        outer = functools.partial(torch.optim.AdamW, lr=0.01)
        opt = DiLoCoOptimizer(opt, model=net, period=2, outer=outer)
    else:
        opt = ModelAverageOptimizer(opt, model=net, period=2)
    model = torch.nn.parallel.DistributedDataParallel(net) if how == "ddp" else net
    data = torch.Generator().manual_seed(0 if how == "same" else dist.get_rank())
    for _ in springline.steps(16):
        opt.zero_grad()
        model(torch.randn(8, 4, generator=data)).square().mean().backward()
        opt.step()
    opt.finish()
    print("trained", flush=True)
    springline.SharedCenter.open(springline.directory() / "center").close()
    del model  # DDP's threads must end before the group, or torch aborts the process now and then
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
