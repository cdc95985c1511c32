"""Archives from somebody else: what is refused, and that nothing lands outside the folder."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pool.agent import archive
from pool.agent.archive import BadArchive, Limits


def packed(*entries: tuple[str, Any], level: int = 9) -> io.BytesIO:
    """A tar.gz of (name, bytes | link target with its type | TarInfo)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                out.addfile(info)
    return io.BytesIO(gzip.compress(raw.getvalue(), level))


def code_of(source: io.BytesIO, limits: Limits | None = None) -> str:
    with pytest.raises(BadArchive) as caught:
        archive.check(source, limits or Limits())
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/etc/cron.d/x", "path_absolute"),
        ("../x", "path_outside"),
        ("a/../../x", "path_outside"),
        ("a/..", "path_outside"),
        ("a\nb", "name_odd"),
        ("a\x1b[31m", "name_odd"),
        ("a\\..\\b", "name_odd"),
        ("x" * 256, "name_too_long"),
        ("/".join("d" * 3 for _ in range(40)), "name_too_long"),
    ],
)
def test_names_with_tricks_are_refused(name: str, code: str) -> None:
    assert code_of(packed(("ok.txt", b"1"), (name, b"2"))) == code


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE]
)
def test_links_and_devices_are_refused(kind: bytes) -> None:
    assert code_of(packed(("l", (kind, "ok.txt")))) == "entry_refused"


def test_bombs_are_refused_by_what_they_unpack_to() -> None:
    small = Limits(files=10, bytes=1 << 20)
    assert code_of(packed(("zero", bytes(2 << 20))), small) == "archive_too_large"
    assert code_of(packed(*[(f"f{n}", b"") for n in range(11)]), small) == "too_many_files"
    # Padding after the last entry, and a header that claims less than what comes, are bytes as well.
    bomb = io.BytesIO(gzip.compress(packed_raw() + bytes(4 << 20)))
    assert archive.check(bomb, small).files == 1  # reading ends at tar's own end
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 512 << 20
    giant = io.BytesIO(gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 20)))
    assert code_of(giant, Limits()) == "archive_unreadable"


def packed_raw() -> bytes:
    return gzip.decompress(packed(("one", b"1")).getvalue())


@pytest.mark.parametrize(
    "data",
    [b"", b"no archive", gzip.compress(b"no tar either" * 100)],
    ids=["nothing", "text", "packed text"],
)
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    if data == b"":
        assert code_of(io.BytesIO(data)) == "archive_unreadable"
    else:
        assert code_of(io.BytesIO(data)) == "archive_unreadable"


def test_a_cut_archive_is_refused() -> None:
    whole = packed(("a.bin", os.urandom(100_000))).getvalue()
    assert code_of(io.BytesIO(whole[: len(whole) // 2])) == "archive_unreadable"


def test_the_same_name_twice_or_below_a_file_is_refused() -> None:
    assert code_of(packed(("a", b"1"), ("./a", b"2"))) == "entry_twice"
    assert code_of(packed(("a", b"1"), ("a/b", b"2"))) == "entry_twice"
    assert code_of(packed(("a/b", b"1"), ("a", b"2"))) == "entry_twice"


def unpacked(source: io.BytesIO, where: Path) -> archive.Summary:
    root = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return archive.unpack(source, root, Limits())
    finally:
        os.close(root)


def test_links_that_lie_in_the_target_are_never_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_text("before")
    (inside / "out").symlink_to(outside)
    (inside / "file").symlink_to(outside / "kept")
    with pytest.raises(BadArchive) as caught:
        unpacked(packed(("out/kept", b"after")), inside)
    assert caught.value.code == "path_outside"
    unpacked(packed(("file", b"after")), inside)  # the link itself is replaced
    assert (inside / "file").read_text() == "after" and not (inside / "file").is_symlink()
    assert (outside / "kept").read_text() == "before" and os.listdir(outside) == ["kept"]


def test_what_is_packed_comes_out_the_same_and_links_are_counted(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "深/b").mkdir(parents=True)
    target.mkdir()
    (source / "a.txt").write_text("a")
    (source / "深/b/运行.sh").write_text("#!/bin/sh\n")
    (source / "深/b/运行.sh").chmod(0o755)
    (source / "skip.pyc").write_text("x")
    (source / "link").symlink_to("/etc")
    (source / "fold").symlink_to(source / "深")
    first, second = io.BytesIO(), io.BytesIO()
    chooser = archive.not_ignored(archive.patterns("# caches\n*.pyc\n"))
    done = archive.pack(str(source), first, chooser)
    archive.pack(str(source), second, chooser)
    assert (done.files, done.skipped) == (2, 2) and first.getvalue() == second.getvalue()
    first.seek(0)
    assert unpacked(first, target).files == 2
    assert (target / "深/b/运行.sh").read_text() == "#!/bin/sh\n"
    assert os.access(target / "深/b/运行.sh", os.X_OK) and not os.access(target / "a.txt", os.X_OK)
    assert sorted(os.listdir(target)) == ["a.txt", "深"]


def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any, **_more: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        unpacked(packed(("a/b", b"1")), tmp_path)
