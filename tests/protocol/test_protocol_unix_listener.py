"""A listening UNIX socket: whose path it is, who may connect, and when it is gone."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.unix_listener import connected, listen_at


def test_the_path_has_its_permissions_whatever_the_umask_and_goes_with_its_listener(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    former = os.umask(0o777)
    try:
        listener, vacate = listen_at(str(path), 0o660, 4)
    finally:
        os.umask(former)
    with listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with connected(str(path), 1.0) as client:
            vacate()
            assert not path.exists()
            served, _ = listener.accept()  # it had connected before
            with served:
                client.sendall(b"x")
                assert served.recv(1) == b"x"
    vacate()


def test_what_a_killed_process_left_gives_way_and_what_somebody_uses_does_not(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    first, vacate = listen_at(path, 0o600, 4)
    with first:
        with pytest.raises(AddressError, match="another process listens there"):
            listen_at(path, 0o600, 4)
        connected(path, 1.0).close()
    second, _ = listen_at(path, 0o600, 4)  # nobody listens at the first one's any more
    with second:
        vacate()
        connected(path, 1.0).close()


def test_a_file_or_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(AddressError, match=r"--uds \S+/file: there is something else"):
        listen_at(str(file), 0o600, 4)
    assert file.read_text() == "precious"
    with pytest.raises(AddressError, match=r"--uds \S+/none/s: No such file"):
        listen_at(str(tmp_path / "none" / "s"), 0o600, 4)
