"""The site that `make docs` builds: no broken link, and nothing that a browser would fetch from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"(https?:)?//[^\"]*\"", re.IGNORECASE)


def test_the_site_is_built_and_needs_no_network(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    where = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=where)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        outside = [found[0] for found in FETCHED.finditer(page.read_text()) if 'rel="canonical"' not in found[0]]
        assert outside == [], f"{page.name} fetches {outside[0]}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet.name
