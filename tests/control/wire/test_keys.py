"""Key files: what is made, what is refused, and that no secret is ever part of a text."""

from pathlib import Path

import pytest
from evenflow.cli.errors import UsageError
from evenflow.cli.keys import add_peer, make_keys
from evenflow.control.wire.keys import KeyFault, allow_list, dial_keys, new_pair, server_keys
from zmq.utils import z85


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_only_the_owner_can_read_them(folder: Path) -> None:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "server.key",
        "server.pub",
        "worker.key",
        "client.key",
        "workers/worker.pub",
        "clients/client.pub",
    }
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_pairs_belong_together(folder: Path) -> None:
    for role in ("worker", "client"):
        keys = dial_keys(folder, role)
        assert keys.server == (folder / "server.pub").read_bytes().strip()
        assert allow_list(folder, role) == {z85.decode(keys.public): role}
    secrets = {server_keys(folder).secret, dial_keys(folder, "worker").secret, dial_keys(folder, "client").secret}
    assert len(secrets) == 3


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"server\.key exists and is not overwritten"):
        make_keys(folder)
    add_peer(folder, "client", "alice")
    with pytest.raises(UsageError, match=r"alice/client\.key exists"):
        add_peer(folder, "client", "alice")
    assert before == {path: path.read_bytes() for path in before}
    # One file of a set is enough: the others are not made either.
    (tmp_path / "half" / "clients").mkdir(parents=True)
    (tmp_path / "half" / "clients" / "client.pub").write_text("mine")
    with pytest.raises(UsageError, match=r"client\.pub exists"):
        make_keys(tmp_path / "half")
    assert not (tmp_path / "half" / "server.key").exists()


def test_another_peer_gets_a_folder_to_take_along(folder: Path) -> None:
    lines = add_peer(folder, "worker", "node-7")
    keys = dial_keys(folder / "node-7", "worker")
    assert allow_list(folder, "worker")[z85.decode(keys.public)] == "node-7"
    assert keys.public.decode() in lines[0]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 65])
def test_names_are_names(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a name"):
        add_peer(folder, "client", name)


def test_what_is_said_holds_no_secret(folder: Path, tmp_path: Path) -> None:
    lines = make_keys(tmp_path / "more")
    text = "\n".join([*lines, *add_peer(folder, "client", "bob")])
    text += repr([server_keys(folder), dial_keys(folder, "worker"), dial_keys(folder / "bob", "client")])
    for path in tmp_path.rglob("*.key"):
        assert path.read_text().strip() not in text
    assert (tmp_path / "more" / "server.pub").read_text().strip() in text


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / "worker.key").chmod(0o640)
    with pytest.raises(KeyFault, match=r"worker\.key can be read by other users: chmod 600"):
        dial_keys(folder, "worker")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b"\xff" * 40, b"a b" * 13 + b"c", b"x" * 100_000])
def test_files_that_hold_no_key_are_named(folder: Path, content: bytes) -> None:
    for name in ("client.key", "server.pub"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(KeyFault, match=name):
            dial_keys(folder, "client")
        (folder / name).write_bytes(good)
    (folder / "clients" / "bad.pub").write_bytes(content)
    assert list(allow_list(folder, "client").values()) == ["client"], "and allows nobody"


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyFault, match=r"cannot read the key .*server\.key: No such file"):
        server_keys(tmp_path)
    assert allow_list(tmp_path, "worker") == {}
    public, secret = new_pair()
    assert len(public) == len(secret) == 40
