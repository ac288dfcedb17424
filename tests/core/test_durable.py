"""Files that are written at once: what is no regular file is left as it is."""

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lmi_bench.core import durable
from lmi_bench.core.durable import append_and_sync, drop_torn_tail, lock_folder, read_text, write_text
from lmi_bench.core.errors import InputError


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    """As /dev/null and /dev/stdout are: a rename would put a file in their place."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "page")
    reader.join(120)
    assert read == ["page"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path):
    kept, link = tmp_path / "kept.html", tmp_path / "latest.html"
    kept.write_text("old")
    link.symlink_to(kept)
    write_text(link, "new")
    assert link.is_symlink()
    assert kept.read_text() == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept.html", "latest.html"]


def test_new_files_have_the_users_mask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "page.html", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


def test_a_folder_in_the_way_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*: Is a directory"):
        write_text(tmp_path, "x")


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    "write", [lambda path: append_and_sync(path, b"x"), lambda path: durable.write_inside(path, "x"), drop_torn_tail]
)
def test_run_files_follow_no_links(tmp_path, write, is_there):
    """Neither to a file nor to a place where one would appear."""
    outside, inside = tmp_path / "outside", tmp_path / "requests.jsonl"
    if is_there:
        outside.write_text("kept")
    inside.symlink_to(outside)
    with pytest.raises(InputError, match="is a symbolic link"):
        write(inside)
    assert outside.read_text() == "kept" if is_there else not outside.exists()


def test_a_device_and_a_pipe_without_an_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_MOST_BYTES", 2**20)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def fill():
        with suppress(BrokenPipeError), pipe.open("wb") as file:
            while True:
                file.write(bytes(2**16))

    writer = threading.Thread(target=fill)
    writer.start()
    for path in (Path("/dev/zero"), pipe):
        with pytest.raises(InputError, match=f"cannot read {path}: .* after the first 1 MiB"):
            read_text(path)
    writer.join(120)
    assert not writer.is_alive()
    assert read_text(Path(os.devnull)) == ""


def test_line_ends_are_those_of_python(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(tmp_path / "a") == "a\nb\nc\n"


def test_a_lock_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("kept")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").symlink_to(outside)
    with pytest.raises(InputError, match="is a symbolic link"):
        lock_folder(folder)
    assert outside.read_text() == "kept"
