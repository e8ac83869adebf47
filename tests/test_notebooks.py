"""The notebooks as a reader finds them, and nbval's comparison, which must be able to fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import nbformat
import pytest
from support import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHECK = "# NBVAL_CHECK_OUTPUT"


def _code(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request):
    return request.param


def test_notebook_is_stored_run_from_top_to_bottom_without_an_error_that_is_not_meant(notebook):
    cells = _code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    meant = [cell for cell in cells if "raises-exception" in cell.metadata.get("tags", [])]
    assert [cell for cell in cells if any(output.output_type == "error" for output in cell.outputs)] == meant


def test_at_least_five_cells_hold_their_numbers(notebook):
    checked = [cell for cell in _code(notebook) if CHECK in cell.source]
    assert len(checked) >= 5
    for cell in checked:
        assert any(re.search(r"\d", json.dumps(output)) for output in cell.outputs), f"nothing to compare below: {cell.source}"


def test_no_cell_is_saved_with_more_than_80_kb(notebook):
    for cell in _code(notebook):
        size = len(json.dumps(cell.outputs))
        assert size <= 80_000, f"{size} bytes below: {cell.source[:80]}"


def test_outputs_have_pictures_with_words_and_no_widget(notebook):
    bundles = [output.data for cell in _code(notebook) for output in cell.outputs if "data" in output]
    assert not [bundle for bundle in bundles if "application/vnd.jupyter.widget-view+json" in bundle]
    pages = [bundle["text/html"] for bundle in bundles if "<img" in bundle.get("text/html", "")]
    assert pages, "no picture in the whole notebook"
    for page in pages:
        for image in re.findall(r"<img\b[^>]*>", page):
            assert re.search(r'\balt="[^"]*\d[^"]*"', image), f"a picture without numbers in its alt text: {image[:120]}"
            assert 'src="data:image/' in image


def test_notebook_says_whether_it_needs_a_gpu(notebook):
    first = nbformat.read(notebook, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert "GPU" in first.source


def _nbval(path):
    return subprocess.run(
        [sys.executable, "-m", "pytest", path, "--rootdir", path.parent, "-c", "/dev/null", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env",
         f"--nbval-sanitize-with={ROOT / 'tests' / 'nbval_sanitize.cfg'}"],
        capture_output=True, text=True, check=False, cwd=path.parent,
    )  # fmt: skip


@pytest.mark.cost(10.6)
def test_one_wrong_number_in_a_copy_is_seen(tmp_path):
    """Break the last digit of one checked cell's saved output: that cell fails, and no other."""
    path = ROOT / "notebooks" / "01_first_steps.ipynb"
    book = nbformat.read(path, as_version=4)
    # what the checked snapshot cells need and nothing else: the training cells are run by `make test` itself
    book.cells = [cell for cell in book.cells if cell.cell_type == "code" and not cell.metadata.get("tags", []).count("trains")]
    checked = [cell for cell in book.cells if CHECK in cell.source]
    broken = checked[-1]
    (output,) = broken.outputs
    holder = output if "text" in output else output["data"]
    key = "text" if "text" in output else "text/plain"
    right = "".join(holder[key])
    holder[key] = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit.group()) + 1) % 10), right, count=1)
    assert holder[key] != right
    (tmp_path / "data").symlink_to(ROOT / "notebooks" / "data")
    copy = tmp_path / "copy.ipynb"
    nbformat.write(book, copy)
    done = _nbval(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED .*::Cell (\d+)", done.stdout, re.MULTILINE)
    assert failed == [str([cell for cell in book.cells if cell.cell_type == "code"].index(broken))], done.stdout
