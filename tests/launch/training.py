"""A worker's script for the tests of the launcher: `training.py RULE STEPS PAUSE [SIZE]`.

Each step adds 1 to the parameters. With a gradient of −1 AGN's outer optimizer does the same.
"""

import sys
import time

import numpy as np

import springline
from springline.rules import SGD
from springline.run import Run


def main(rule, total, pause, size=100):
    run = Run.from_environment()
    rules = {
        "elastic": lambda: springline.ElasticAverage(period=2, workers=run.workers),
        "average": lambda: springline.ModelAverage(period=2, workers=run.workers),
        "agn": lambda: springline.AGN(period=2, workers=run.workers, outer=SGD(1.0)),
    }
    parameters = {"w": np.zeros(size, np.float32)}
    with springline.Worker(
        parameters, rules[rule](), center=run.center_directory, rank=run.rank
    ) as worker:
        try:
            for step in springline.steps(total):
                worker.observe({"w": np.full(size, -1, np.float32)})
                worker.parameters["w"] += 1
                worker.step()
                run.log(step + 1, {"loss": 1 / (step + 1)})
                time.sleep(pause)
        finally:
            print(f"rank {run.rank} is at its end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
