"""AGN written out in plain torch: two optimizer objects, one for `x` and one for `c`."""

import copy

from torch_training import loss_of, network


class Loop:
    """One worker and a center.

    Args:
        make: makes an optimizer for a model; it is called for the worker's and for the center's.
        period: τ.
        schedule: makes a scheduler for the worker's optimizer.
        model: the worker's, by default the small network.
    """

    def __init__(self, make, period=3, schedule=None, model=None, loss=loss_of):
        self.model = network() if model is None else model
        self.center = copy.deepcopy(self.model)
        self.inner, self.outer = make(self.model), make(self.center)
        self.scheduler = schedule(self.inner) if schedule else None
        self.period, self.loss = period, loss
        self.sums = {}
        self.done = 0

    def step(self):
        """One local step; an outer step of the center if it is due."""
        self.inner.zero_grad()
        self.loss(self.model, self.done).backward()
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                g = p.grad.to_dense()
                self.sums[name] = self.sums[name] + g if name in self.sums else g.clone()
        self.inner.step()
        self.done += 1
        if self.done % self.period == 0:
            self.exchange()
        if self.scheduler:
            self.scheduler.step()

    def exchange(self):
        """The mean gradient moves the center, and the worker goes on from there."""
        for name, p in self.center.named_parameters():
            p.grad = self.sums[name] / self.period if name in self.sums else None
        for outer, inner in zip(self.outer.param_groups, self.inner.param_groups, strict=True):
            outer["lr"] = inner["lr"]
        self.outer.step()
        self.model.load_state_dict(self.center.state_dict())
        self.sums = {}

    def run(self, steps):
        """Some steps."""
        for _ in range(steps):
            self.step()
