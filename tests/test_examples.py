"""The examples in the docstrings of public names run and give what they say; every public function has one."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import pytest
from support import ROOT

import nbmemprof as mp

pytestmark = pytest.mark.cost(0.02)
NAMES = {name: getattr(mp, name) for name in mp.__all__ if callable(getattr(mp, name))}
NAMES |= {f"{room}.{name}": getattr(getattr(mp, room), name) for room in ("allocator", "access", "probes") for name in getattr(mp, room).__all__}
EXAMPLES = {name: text for name, made in NAMES.items() if callable(made) and ">>>" in (text := inspect.getdoc(made) or "")}


def failures(names: list[str]) -> str:
    """What the examples of these names give instead of what they say."""
    told: list[str] = []
    for name in names:
        test = doctest.DocTestParser().get_doctest(EXAMPLES[name], {}, name, None, 0)
        doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    return "".join(told)


def test_every_public_function_has_an_example():
    questions = {name for name, made in NAMES.items() if inspect.isfunction(made)}
    assert questions - set(EXAMPLES) == set()


@pytest.mark.parametrize("name", [name for name, text in EXAMPLES.items() if "torch" not in text.partition("Examples")[2]])
def test_an_example_gives_what_it_says(name):
    assert failures([name]) == ""


@pytest.mark.soak
def test_examples_that_need_torch_give_what_they_say():
    """In a fresh process, as a reader's: tensors of other tests would count too."""
    pytest.importorskip("torch")
    code = "import test_examples as t; print(t.failures([name for name, text in t.EXAMPLES.items() if 'torch' in text]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT / "tests", timeout=300, env=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
