"""Where stages that were started by hand meet."""

from pathlib import Path

import pytest
from evenflow.dataplane.meeting import NoMeeting, host_identity, meet_at, part


def test_the_first_makes_it_and_the_last_takes_it_away(tmp_path: Path) -> None:
    place = tmp_path / "links.r1"
    meet_at(place, 3)
    assert place.stat().st_mode & 0o777 == 0o700
    (place / "e3-0.pipe").touch()
    meet_at(place, 3)
    part(place)
    assert place.exists(), "somebody is still there"
    (place / "e3-0.pipe").unlink()
    part(place)
    part(place)
    assert not place.exists()


def test_what_dead_workers_left_is_removed(tmp_path: Path) -> None:
    for name in ("e3-1.ring", "e10-0.pipe", "e4-0.pipe", "other"):
        (tmp_path / name).touch()
    tmp_path.chmod(0o700)
    meet_at(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e10-0.pipe", "other"]


def test_a_place_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("open", "file", "link"):
        with pytest.raises(NoMeeting, match=f"{name} is not a directory that belongs to this user alone"):
            meet_at(tmp_path / name, 1)


def test_a_place_on_another_host_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoMeeting, match=r"cannot meet in .*nowhere/links.r1 .*they must be on one host"):
        meet_at(tmp_path / "nowhere" / "links.r1", 1)


def test_a_host_is_itself() -> None:
    assert host_identity() == host_identity() and len(host_identity()) <= 256
