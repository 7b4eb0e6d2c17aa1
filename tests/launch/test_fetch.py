"""How a worker's files come to the run's directory, piece by piece."""

import os

import pytest

from springline.launch import fetch
from springline.launch.fetch import Fetched, Piece, pieces, stamps


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
    count, final = 0, stamps(there) if ended else None
    while found := pieces(there, fetched.have, final):
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
        first = pieces(there, {})
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
    (piece,) = pieces(there, fetched.have)
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
    for name in ("stop", "lock", ".hidden", "launch.json", "center/status.json"):
        (there / name).touch()
    fetched = Fetched(here, 0)
    bring(there, fetched)
    assert [path.name for path in here.iterdir()] == ["total"]
    bring(there, fetched, ended=True)
    assert (here / "samples" / "one.txt").read_text() == "mine"
    assert sorted(path.name for path in here.iterdir()) == ["samples", "total"]


def test_what_a_worker_has_left_running_prints_does_not_come_for_ever(there, here, monkeypatch):
    monkeypatch.setattr(fetch, "_PIECE", 4)
    log = there / "logs" / "rank-0.log"
    log.write_text("0123456789")
    (there / "kept").write_text("whole")
    final, fetched = stamps(there), Fetched(here, 0)
    for _ in range(5):
        for piece in pieces(there, fetched.have, final):
            fetched.take(piece)
        with log.open("a") as file:
            file.write("more and more")
        (there / "kept").write_text("whole, and more")
        (there / "logs" / "another.log").touch()
    assert pieces(there, fetched.have, final) == []
    assert (here / "logs" / "rank-0.log").read_text() == "0123456789"
    assert (here / "kept").read_text() == "whole"
    assert not (here / "logs" / "another.log").exists()
    assert bring(there, fetched) > 0  # in its next life
    assert (here / "logs" / "rank-0.log").read_text() == log.read_text()


def test_an_answer_is_bounded_and_all_comes_in_the_end(there, here, monkeypatch):
    monkeypatch.setattr(fetch, "_PIECE", 4)
    for number in range(10):
        (there / "metrics" / f"{number}").write_text("ab")
    fetched = Fetched(here, 0)
    assert len(pieces(there, fetched.have)) == 2
    assert bring(there, fetched) == 10
    assert len(list((here / "metrics").iterdir())) == 10


def test_what_cannot_be_read_is_left_out(there, here, monkeypatch):
    for name in ("good", "bad", "gone"):
        (there / "logs" / name).write_text(name)
    (there / "logs" / "link").symlink_to(there / "logs" / "good")
    final = stamps(there)
    (there / "logs" / "gone").unlink()
    real = type(there).open

    def refuse(path, *rest):
        if path.name == "bad":
            raise PermissionError(13, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(type(there), "open", refuse)
    assert [piece.name for piece in pieces(there, {})] == ["logs/good"]
    assert [piece.name for piece in pieces(there, {}, final)] == ["logs/good"]


def test_a_directory_that_goes_during_the_walk_does_no_harm(there, monkeypatch):
    (there / "logs" / "kept").touch()
    (there / "logs" / "gone").touch()
    real = type(there).lstat

    def vanish(path):
        if path.name == "gone":
            path.unlink()
        return real(path)

    monkeypatch.setattr(type(there), "lstat", vanish)
    assert list(stamps(there)) == ["logs/kept"]
    assert stamps(there / "nowhere") == {}


@pytest.mark.parametrize("name", ["/absolute", "../beside", "logs/../../beside", "launch.json"])
def test_a_name_from_elsewhere_stays_in_the_directory(here, name):
    name = str(here.parent) + name if name == "/absolute" else name
    with pytest.raises(OSError, match="no file of a worker may be called"):
        Fetched(here, 0).take(Piece(name, (1, 1), 0, b"x", last=True))
    assert [path.name for path in here.parent.rglob("*")] == ["here"]


def test_a_write_that_fails_half_way_leaves_nothing(there, here, monkeypatch):
    log = there / "logs" / "rank-0.log"
    log.write_text("first ")
    fetched = Fetched(here, 0)
    bring(there, fetched)
    with log.open("a") as file:
        file.write("second")
    (piece,) = pieces(there, fetched.have)
    real, written = os.write, []

    def full(fd, data):
        if written:
            raise OSError(28, "No space left on device")
        written.append(real(fd, bytes(data)[:3]))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            fetched.take(piece)
    assert (here / "logs" / "rank-0.log").read_text() == "first "
    bring(there, fetched)
    assert (here / "logs" / "rank-0.log").read_text() == "first second"
