"""The site that `make docs` builds: no broken link, nothing that a browser would fetch from elsewhere, a search."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"(https?:)?//[^\"]*\"", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install .[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    where = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=where)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built_and_needs_no_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        outside = [found[0] for found in FETCHED.finditer(page.read_text()) if 'rel="canonical"' not in found[0]]
        assert outside == [], f"{page.name} fetches {outside[0]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet.name


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_the_search_finds_a_word_in_files_that_no_server_serves(site, tmp_path):
    page = (site / "index.html").as_uri() + "?q=residual"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command = [str(CHROMIUM), *quiet, "--window-size=1280,1000", "--virtual-time-budget=20000", "--dump-dom", page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200).stdout
    found = re.search(r"(\d+) matching documents", shown)
    assert found and int(found[1]) > 3, "the search is hidden, or found nothing"
