"""Flax's own attention tests, of the installed version, with our layers and hooks in the place of Flax's.

The tests are not part of this repository: they come with Flax's source distribution, which is taken from the folder
FLAX_SDIST_DIR (unpacked), else from the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import flax
import pytest

HERE = Path(__file__).parent
# Flax 0.12.12 has 150 in both files; far fewer would mean that they were not found.
FEWEST_TESTS = 120
DOWNLOAD_SECONDS = 180


def download(folder: Path) -> Path:
    """The unpacked source distribution; skips if there is no index to get it from, and fails on CI."""
    requirement = f"flax=={flax.__version__}"
    # pip asks the sources for their metadata, and to do so without an environment of its own needs what builds them.
    python, isolation = [sys.executable], []
    if uv := os.environ.get("UV") or shutil.which("uv"):  # "uv run" says in UV where it is itself
        tools = ["--with", "pip", "--with", "setuptools", "--with", "setuptools-scm"]
        python = [uv, "run", "--no-project", "--python", sys.executable, *tools, "python"]
        isolation = ["--no-build-isolation"]
    command = [*python, "-m", "pip", "download", "--no-deps", "--no-binary", "flax", *isolation, requirement]
    done = subprocess.run(
        [*command, "--dest", str(folder)], cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
    )
    archives = list(folder.glob("flax-*.tar.gz"))
    if not archives:
        reason = f"{requirement} is not to be had from the package index: {done.stderr.strip()[-500:]}"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"flax-{flax.__version__}"


@pytest.mark.slow
def test_flax_own_attention_tests_pass(tmp_path):
    given = os.environ.get("FLAX_SDIST_DIR")
    source = Path(given) if given else download(tmp_path)
    files = [source / "tests" / name for name in ("nnx/nn/attention_test.py", "linen/linen_attention_test.py")]
    version = re.search(r"^Version: (.*)$", (source / "PKG-INFO").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == flax.__version__
    report = tmp_path / "report.xml"
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    plugins = ["-p", "substitute", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-q", "-c", os.devnull, "--rootdir", str(source), *plugins, f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped")}
    assert counts["tests"] - counts["skipped"] >= FEWEST_TESTS
    # The substitution worked: nearly every test runs our attention at least once.
    called = re.search(r"our attention was called (\d+) times", done.stdout)
    assert called is not None
    assert int(called[1]) >= FEWEST_TESTS
