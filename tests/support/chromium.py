"""Chromium, for the tests of pages. Continuous integration installs it; elsewhere they are left out without it."""

import os
import shutil
import subprocess

import pytest

_FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(
    _FOUND is None and "CI" not in os.environ, reason="needs Chromium (apt-get install chromium)"
)


def show(url, folder, *options, timeout=200):
    """What headless Chromium prints on standard output, with these options, and on standard error, as text."""
    command = [_FOUND or "chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    done = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=timeout, check=True)
    return done.stdout, done.stderr
