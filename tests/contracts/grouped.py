"""The collective center for the contract's tests: ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from centers import Place

from springline import Worker
from springline.center import Layout
from springline.center.collective import CollectiveCenter
from springline.center.collective.group import Group


class Grouped(Place):
    """All ranks of a process group, each a thread with a backend of its own."""

    center = CollectiveCenter
    asynchronous = False
    joinable = False

    @staticmethod
    def takes(rule):
        return not rule.accumulates

    def make(self, layout, rule, values, use_locking=True, restore=None, rank=0, store=None):
        seconds = timedelta(seconds=30)
        backend = dist.ProcessGroupGloo(store or dist.HashStore(), rank, rule.workers, seconds)
        group = Group(backend)
        self.opened.append(CollectiveCenter(group, layout, rule, values, restore=restore))
        return self.opened[-1]

    def workers(self, parameters, rule, *, buffers=None, use_locking=True, restore=None, **options):
        layout = Layout.of(parameters, buffers, rule.fragments)
        values = {**parameters, **(buffers or {})}
        store, options = dist.HashStore(), {"synchronous": False} | options

        def worker(rank):
            center = self.make(layout, rule, values, restore=restore, rank=rank, store=store)
            return Worker(parameters, rule, center, rank, buffers=buffers, **options)

        with ThreadPoolExecutor(rule.workers) as pool:
            return list(pool.map(worker, range(rule.workers)))
