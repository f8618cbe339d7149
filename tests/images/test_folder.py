from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from kedge.errors import DataError
from kedge.images import list_classes, list_images


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in list_images(folder)]


def test_lists_recursively_and_sorted(tmp_path: Path) -> None:
    touch(tmp_path / "b" / "2.JPG", tmp_path / "b" / "1 ж.png", tmp_path / "a.webp", tmp_path / "b.jpeg")
    touch(tmp_path / "b" / "deep" / "er" / "x.gif", tmp_path / "notes.txt", tmp_path / "b" / "thumbs.db")
    touch(tmp_path / ".hidden.jpg", tmp_path / ".git" / "x.jpg")
    assert names(tmp_path) == ["a.webp", "b/1 ж.png", "b/2.JPG", "b/deep/er/x.gif", "b.jpeg"]


def test_links_are_followed_once(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "1.jpg", tmp_path / "elsewhere" / "2.jpg")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "self.jpg").symlink_to("self.jpg")
    (tmp_path / "a" / "lost.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "a" / "linked.jpg").symlink_to("1.jpg")
    found = names(tmp_path / "a")
    assert found == ["1.jpg", "linked.jpg", "lost.jpg", "self.jpg", "up/elsewhere/2.jpg"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_not_pictures(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    assert names(tmp_path) == []


def test_classes_are_first_level_folders(tmp_path: Path) -> None:
    touch(tmp_path / "кот" / "x" / "1.jpg", tmp_path / "dog" / "2.png", tmp_path / "dog" / "1.png")
    touch(tmp_path / "empty" / "readme.txt", tmp_path / "loose.jpg", tmp_path / ".cache" / "1.jpg")
    (tmp_path / "hound").symlink_to(tmp_path / "dog")
    classes, files, labels = list_classes(tmp_path)
    assert classes == ["dog", "hound", "кот"]
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "dog/1.png",
        "dog/2.png",
        "hound/1.png",
        "hound/2.png",
        "кот/x/1.jpg",
    ]
    assert labels == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("listing", [list_images, list_classes])
def test_what_is_no_folder(tmp_path: Path, listing) -> None:
    with pytest.raises(DataError, match=r"Folder .*absent does not exist"):
        listing(tmp_path / "absent")
    touch(tmp_path / "file.jpg")
    with pytest.raises(DataError, match=r"file\.jpg is a file"):
        listing(tmp_path / "file.jpg")


@pytest.mark.skipif(sys.platform != "linux", reason="only there may a name hold any bytes")
def test_a_class_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)  # noqa: PTH102
    Image.new("RGB", (4, 4)).save(os.fsdecode(folder + b"/a.png"))
    with pytest.raises(DataError, match=r"'caf\\udce9' in .* cannot be a class name: rename it"):
        list_classes(tmp_path)


def test_the_old_name_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.warns(DeprecationWarning, match="list_pictures is now list_images"):
        from kedge.images import list_pictures
    assert list_pictures(tmp_path) == [tmp_path / "a.png"]
