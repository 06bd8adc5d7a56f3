"""The cache of kernels: what is run is what was generated, and no other user can put code there."""

import errno
import importlib.util
import os
import pickle
import py_compile
import sys
from pathlib import Path

import pytest

from hipress import settings
from hipress.compll import build
from hipress.compll.build import folder_problem, import_source
from hipress.errors import BackendError
from hipress.probe.cache import make_folder

SOURCE = "VALUE = 'generated'\n"
PLANTED = "VALUE = 'planted'\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "home" / "cache"
    monkeypatch.setenv("HIPRESS_CACHE_DIR", str(folder))
    return folder


def warm(cache):
    """Fills the cache; returns the file."""
    module = import_source(SOURCE, "warm")
    assert module.VALUE == "generated"
    return Path(module.__file__)


def give_away(folder, monkeypatch):
    """Makes a folder another user's, as far as this process can tell."""
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def test_a_file_with_the_right_name_and_other_content_is_not_run(cache):
    """Catches: a kernel that is run because its name is right."""
    path = warm(cache)
    path.write_text(PLANTED)
    assert import_source(SOURCE, "warm").VALUE == "generated"
    assert path.read_text() == SOURCE
    assert [one.name for one in path.parent.iterdir() if one.is_file()] == [path.name]


def test_bytecode_beside_a_kernel_is_not_run(cache):
    """Catches: an import that takes the .pyc of another source."""
    path = warm(cache)
    planted = path.parent / "planted.py"
    planted.write_text(PLANTED)
    py_compile.compile(
        str(planted),
        importlib.util.cache_from_source(str(path)),
        str(path),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    assert import_source(SOURCE, "warm").VALUE == "generated"


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
@pytest.mark.parametrize("first", ["kernels", "costs"])
def test_the_folder_is_made_for_its_user_alone(cache, umask, first):
    """Catches: a cache that others of the group may write, because of the umask."""
    before = os.umask(umask)
    try:
        if first == "costs":
            make_folder(settings.cache_dir())
        warm(cache)
    finally:
        os.umask(before)
    for folder in (cache, cache / "kernels"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("which", ["", "kernels", "kernels/__pycache__"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_folder_that_others_can_write_is_refused(cache, which, mode):
    """Catches: machine code of numba's (a pickle) that another user has put there."""
    warm(cache)
    (cache / "kernels" / "__pycache__").mkdir(exist_ok=True)
    (cache / "kernels" / "__pycache__" / "x.nbi").write_bytes(pickle.dumps("anything"))
    folder = cache / which
    folder.chmod(mode)
    with pytest.raises(BackendError) as caught:
        import_source(SOURCE, "warm")
    text = str(caught.value)
    assert text.startswith(
        f"the cache folder {folder} can be written by other users (mode {mode:o}"
    )
    assert f"delete {cache / 'kernels'} and make the folder writable by you alone" in text
    assert "or set HIPRESS_CACHE_DIR to a folder of your own." in text and "\n" not in text
    folder.chmod(0o755)
    warm(cache)


@pytest.mark.parametrize("which", ["", "kernels"])
def test_a_folder_of_another_user_is_refused(cache, which, monkeypatch):
    """Catches: code of another user that is run by this one."""
    warm(cache)
    give_away(cache / which, monkeypatch)
    with pytest.raises(BackendError, match="belongs to user .*, and this process runs as user"):
        import_source(SOURCE, "warm")


def test_a_folder_in_tmp_is_allowed(cache):
    """Catches: a refusal where nobody can replace the folder of kernels."""
    cache.mkdir(parents=True)
    cache.chmod(0o1777)
    warm(cache)
    assert folder_problem(cache) == ""


def test_symbolic_links_are_followed(cache, tmp_path):
    """Catches: a cache on another disk that stops working, and a check of the link itself."""
    real = tmp_path / "disk"
    real.mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(real)
    assert warm(cache).resolve().parent == real / "kernels"
    (real / "kernels").rename(tmp_path / "elsewhere")
    (real / "kernels").symlink_to(tmp_path / "elsewhere")
    warm(cache)
    (tmp_path / "elsewhere").chmod(0o777)
    with pytest.raises(BackendError, match="can be written by other users"):
        import_source(SOURCE, "warm")


@pytest.fixture
def read_only(monkeypatch):
    """Every write fails as on a read-only disk."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def switch():
        monkeypatch.setattr(build, "open", refuse, raising=False)
        monkeypatch.setattr(os, "replace", refuse)
        monkeypatch.setattr(os, "mkdir", refuse)

    return switch


def test_a_filled_cache_on_a_read_only_disk_works(cache, read_only):
    """Catches: a write for a kernel that is there."""
    warm(cache)
    read_only()
    warm(cache)


def test_a_wrong_file_on_a_read_only_disk_is_refused(cache, read_only):
    """Catches: a file that is run because it cannot be replaced."""
    path = warm(cache)
    path.write_text(PLANTED)
    read_only()
    with pytest.raises(BackendError, match=r"cannot write kernels to .*\(Read-only file system\)"):
        import_source(SOURCE, "warm")


def test_hosts_that_share_a_home_share_the_cache(cache):
    """Catches: a second host that writes a file anew, which would make numba compile again."""
    path = warm(cache)
    written_ns = path.stat().st_mtime_ns
    del sys.modules[f"hipress_kernels.{path.stem}"]
    assert warm(cache) == path
    assert path.stat().st_mtime_ns == written_ns


def test_the_folder_of_numba_is_for_its_user_alone(cache):
    """Catches: a cache that is refused from the second kernel on, where the umask is 002."""
    source = "from numba import njit\n\n\n@njit(cache=True)\ndef one():\n    return 1\n"
    before = os.umask(0o002)
    try:
        assert import_source(source, "first").one() == 1
        assert import_source(source + "# another\n", "second").one() == 1
    finally:
        os.umask(before)
