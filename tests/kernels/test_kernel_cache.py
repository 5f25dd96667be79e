"""Where compiled kernels are kept, when neither the package nor the home can be written to."""

import os
import tempfile

import pytest
from numba import config
from numba.core import caching

from thinwire.kernels.cpu import common


def one_more(x):
    return x + 1


@pytest.mark.parametrize("writable", [True, False])
def test_kernels_compile_where_the_package_cannot_be_written_to(monkeypatch, tmp_path, writable):
    def ensure(self):
        if not os.path.abspath(self.get_cache_path()).startswith(str(tmp_path)):
            raise OSError(30, "Read-only file system")
        os.makedirs(self.get_cache_path(), exist_ok=True)

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", ensure)
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not writable:
        (tmp_path / f"thinwire-kernels-{os.getuid()}").mkdir()
        (tmp_path / f"thinwire-kernels-{os.getuid()}").chmod(0o777)  # anybody could have put something there
    common._own_folder.cache_clear()
    assert common.compiled(one_more)(1) == 2
    kept = list((tmp_path / f"thinwire-kernels-{os.getuid()}").rglob("*.nbi"))
    assert bool(kept) == writable
    common._own_folder.cache_clear()
