"""How a worker's files come to the run's directory, piece by piece."""

import os

import pytest

from springline.launch import fetch
from springline.launch.fetch import Fetched, pieces


@pytest.fixture
def there(tmp_path):
    """The worker's directory."""
    for folder in ("logs", "metrics", "center"):
        (tmp_path / "there" / folder).mkdir(parents=True)
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path):
    """The run's."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def bring(there, fetched, ended=False):
    """Ask until there is nothing new; return how many pieces came."""
    count = 0
    while found := pieces(there, fetched.have, ended):
        for piece in found:
            fetched.take(piece)
        count += len(found)
        assert count < 100
    return count


def test_output_is_appended_and_a_piece_that_comes_twice_counts_once(there, here, monkeypatch):
    monkeypatch.setattr(fetch, "_PIECE", 4)
    (here / "logs").mkdir()
    (here / "logs" / "rank-1.log").write_text("an earlier life\n")
    (there / "logs" / "rank-1.log").write_text("0123456789")
    fetched = Fetched(here, 1)
    for _ in range(2):  # the first answer seemed lost, so the launcher asked again
        first = pieces(there, {}, ended=False)
        assert [(piece.data, piece.last) for piece in first] == [(b"0123", False)]
        fetched.take(first[0])
    assert bring(there, fetched) == 2
    with (there / "logs" / "rank-1.log").open("a") as file:
        file.write("more")
    assert bring(there, fetched) == 1
    assert (here / "logs" / "rank-1.log").read_text() == "an earlier life\n0123456789more"
    assert bring(there, fetched) == 0


def test_other_files_are_replaced_when_they_are_whole(there, here, monkeypatch):
    monkeypatch.setattr(fetch, "_PIECE", 4)
    extras = there / "center" / "extras.safetensors"
    extras.write_text("first one")
    fetched = Fetched(here, 0)
    (piece,) = pieces(there, fetched.have, ended=False)
    fetched.take(piece)
    assert not (here / "center" / "extras.safetensors").exists()  # only a part of it is here
    extras.write_text("another")  # replaced in the middle
    os.utime(extras, ns=(1, 1))
    assert bring(there, fetched) == 2
    assert (here / "center" / "extras.safetensors").read_text() == "another"
    assert list((here / "center").iterdir()) == [here / "center" / "extras.safetensors"]
    assert bring(there, fetched) == 0


def test_an_empty_file_comes_once(there, here):
    (there / "report.txt").touch()
    (there / "logs" / "rank-0.log").touch()
    fetched = Fetched(here, 0)
    assert bring(there, fetched) == 2
    assert (here / "report.txt").read_text() == ""
    assert bring(there, fetched) == 0


def test_what_the_script_made_itself_comes_when_it_has_ended(there, here):
    (there / "total").write_text("7\n")
    (there / "samples").mkdir()
    (there / "samples" / "one.txt").write_text("mine")
    for name in ("stop", "lock", ".hidden"):
        (there / name).touch()
    fetched = Fetched(here, 0)
    bring(there, fetched)
    assert [path.name for path in here.iterdir()] == ["total"]
    bring(there, fetched, ended=True)
    assert (here / "samples" / "one.txt").read_text() == "mine"
    assert sorted(path.name for path in here.iterdir()) == ["samples", "total"]
