"""The job script for Slurm: it can be read by bash, and the options that it uses are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from springline.cli import app

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"


def commands(name):
    """The options that the script gives to a command."""
    text = SCRIPT.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [re.search(rf"\b({name}) (.*)", line) for line in lines]
    return {option for m in found if m for option in re.findall(r"(?<= )--[a-z-]+", f" {m[2]}")}


def test_bash_can_read_it():
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_outside_of_a_job_it_says_so():
    ended = subprocess.run(
        ["bash", SCRIPT], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert ended.returncode != 0
    assert "submit it with sbatch" in ended.stderr


def test_a_job_whose_ray_does_not_start_fails_at_once(tmp_path):
    programs = {"scontrol": "echo one", "srun": "exit 1", "ray": "exit 1"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o700)
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "one", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    ended = subprocess.run(["bash", SCRIPT], env=job, check=False, timeout=60)
    assert ended.returncode != 0


def test_springline_has_the_options_that_it_uses():
    command = typer.main.get_command(app).commands["run"]
    known = {option for parameter in command.params for option in parameter.opts}
    used = commands("springline run")
    assert {"--address", "--run", "--workers"} <= used <= known


@pytest.mark.parametrize("name", ["start", "status", "health-check"])
def test_ray_has_the_options_that_it_uses(name):
    ray = [sys.executable, "-m", "ray.scripts.scripts", name, "--help"]
    said = subprocess.run(ray, capture_output=True, text=True, check=True)
    used = commands(f"ray {name}")
    assert used
    assert used <= set(re.findall(r"--[a-z-]+", said.stdout))
