"""A script as a user writes it, alone or in a run: `python torch_script.py END [overlap]`."""

import sys

import torch
from torch_training import INNERS, network, train, wrap


def main(end, overlap):
    torch.set_num_threads(1)
    model = network()
    opt = wrap("elastic", INNERS["sgd"](model.parameters()), 4, model=model, overlap=overlap)
    train(model, opt, range(6))
    if end == "raise":
        raise KeyError("an error of the script")
    if end == "exit":
        sys.exit(0)
    if end == "nan":
        next(model.parameters()).data.fill_(torch.nan)
    if end == "finish":
        opt.finish()


if __name__ == "__main__":
    main(sys.argv[1], "overlap" in sys.argv)
