"""A disk that fills up while a worker trains costs what it would have written, not the worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource
import torch, springline
from springline.torch import ElasticAverageOptimizer

def fill(run):
    if os.path.ismount(run.parent):
        try:
            with open(run.parent / "large", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        except OSError:
            pass
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
model[0].requires_grad_(False)
inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
opt = ElasticAverageOptimizer(inner, model=model, period=4)
fill(springline.directory())
for step in springline.steps(10):
    opt.zero_grad()
    loss = model(torch.ones(1, 4)).square().sum()
    loss.backward()
    opt.step()
    springline.log(loss=loss)
springline.report("the end")
opt.finish()
print(opt.worker.local_step, "steps", opt.worker.center.version, "exchanges")
"""


@pytest.mark.parametrize("how", ["mount", "limit"])
def test_training_goes_on(directory, how):
    """On a tmpfs of 256 pages; with a limit on the size of files, also where we may not mount."""
    directory.mkdir()
    command = [sys.executable, "-c", SCRIPT]
    if how == "mount":
        mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
        private = ["unshare", "-m", "sh", "-c", mount, directory]
        may = subprocess.run([*private, "true"], stderr=subprocess.DEVNULL).returncode == 0
        command = [*private, *command] if may else command
    environment = os.environ | {"SPRINGLINE_RUN": str(directory / "run")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n10 steps 3 exchanges\n"
    warnings = done.stderr.splitlines()
    assert [line.split(" cannot be written, ")[0] for line in warnings] == [
        "A line of the metrics",
        "The number of steps",
        "The report",
        "What the model's file has beside the center",
    ]
    assert all("No space" in line or "File too large" in line for line in warnings)


def test_a_report_that_cannot_be_printed_is_no_error():
    """As where RUN/logs is on the full disk: its text stays in the buffer until the end."""
    code = "import springline; springline.report('the end'); springline.report('indeed')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0
    assert done.stderr.count("The report cannot be written, training goes on without: ") == 1
    assert len(done.stderr.splitlines()) == 1
