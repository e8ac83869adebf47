"""What a person gets from pip: the wheel, the sdist, and the wheel that is built from the sdist."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile

import pytest
from support import ROOT

KERNELS = sorted(path.name for path in (ROOT / "kernels").glob("*.cu"))
BUNDLES = sorted(path.name for path in (ROOT / "nbmemprof" / "static").glob("*.js"))
MODULES = sorted(str(path.relative_to(ROOT)) for ending in ("*.py", "*.js", "*.css", "*.html") for path in (ROOT / "nbmemprof").rglob(ending))


def _build(source, out, *what):
    done = subprocess.run([sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", out, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Names of files in the checkout's wheel and in the sdist's wheel, and in the sdist."""
    out = tmp_path_factory.mktemp("dist")
    _build(ROOT, out, "--wheel")
    _build(ROOT, out, "--sdist")
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = [name.split("/", 1)[-1] for name in archive.getnames()]
        archive.extractall(out / "src", filter="data")
    (unpacked,) = (out / "src").iterdir()
    _build(unpacked, out / "again", "--wheel")
    names = []
    for wheel in (*out.glob("*.whl"), *(out / "again").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names.append(archive.namelist())
    return names, inside


@pytest.mark.cost(1.9)
def test_both_wheels_hold_the_whole_package_and_nothing_else(wheels):
    names, _ = wheels
    assert len(names) == 2
    assert sorted(names[0]) == sorted(names[1])
    for inside in names:
        assert set(MODULES) <= set(inside)
        assert "nbmemprof/py.typed" in inside
        assert len(KERNELS) >= 9
        assert len([name for name in inside if name.startswith("nbmemprof/gpu/probes/recorded/") and name.endswith(".json")]) == 8
        assert {f"nbmemprof/_kernels/{name}" for name in KERNELS} <= set(inside)
        assert {f"nbmemprof/static/{name}" for name in BUNDLES} <= set(inside)
        assert {name.split("/")[0] for name in inside} == {"nbmemprof", "nbmemprof-0.1.0.dist-info"}
        assert not [name for name in inside if name.endswith((".ipynb", ".pyc", ".pickle.gz")) or "node_modules" in name]
        assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_sdist_leaves_the_workshop_at_home(wheels):
    _, inside = wheels
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", *MODULES} <= set(inside)
    assert not [name for name in inside if name.startswith(("tests", "notebooks", "soak")) or "node_modules" in name]
