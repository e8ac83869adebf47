"""What a person sees of a search: the sentence, the picture with its words, the table, the verb, and progress that goes away."""

from __future__ import annotations

import re
import sys
import types

import pytest
from simulated import Simulated, Training

from nbmemprof.errors import FlagError
from nbmemprof.searching.batch import searched
from nbmemprof.searching.progress import Line
from nbmemprof.verbs import max_batch as verb
from nbmemprof.views import max_batch as view

pytestmark = pytest.mark.cost(0.05)
MIB = 1 << 20


@pytest.fixture(scope="module")
def result():
    return searched(Simulated(Training([8 * MIB] * 4, [3 * MIB] * 4), 600 * MIB), 1, None, device="a made-up GPU")


def test_the_sentence_says_the_answer_how_sure_it_is_and_what_it_cost(result):
    assert re.match(
        rf"Largest batch {result.batch} in 600 MiB on a made-up GPU \(modelled\): two full steps ran at {result.batch}, {result.batch + 1} ran out of memory\. 5 tries, 1 out of memory",
        repr(result),
    )
    assert "Each sample adds" in repr(result)


def test_the_output_is_a_sentence_a_picture_with_words_and_a_table(result):
    made = result._repr_mimebundle_()
    html = made["text/html"]
    assert html.count("<img") == 1
    assert f"try 4 at {result.batch} fits with" in re.search(r'alt="([^"]*)"', html)[1]
    assert "<details>" in html
    assert html.count("<tr>") == 6
    assert len(html) + len(made["text/plain"]) < 20_000
    assert "out of memory  confirm" in made["text/plain"]


def test_the_picture_has_the_limit_a_dot_for_what_fitted_and_a_cross_for_what_did_not(result):
    svg, sentence = view.picture(result)
    text = svg.markup()
    assert "limit 600 MiB" in text
    assert text.count("<circle") == 4
    assert text.count(f'stroke="{view._theme.MARK}" stroke-width="2"') == 2
    assert "try 5" in sentence


def test_without_a_measured_peak_there_is_no_picture():
    blind = searched(Simulated(Training([8 * MIB], [3 * MIB]), 200 * MIB, recorded=False), 1, 40)
    assert view.picture(blind) is None
    assert "<img" not in blind._repr_mimebundle_()["text/html"]


@pytest.mark.cost(0.6)
def test_the_chart_takes_the_tries(result):
    pytest.importorskip("altair")
    from nbmemprof.views.charts.max_batch import max_batch

    chart = max_batch(result.tries, limit_bytes=result.room.limit_bytes).to_dict()
    assert len(chart["layer"]) == 3


def test_the_verb_takes_functions_of_the_notebook_by_name(monkeypatch, result):
    asked: dict = {}

    def played(step, low, high, **options):
        asked.update(step=step, low=low, high=high, **options)
        return result

    shown: list = []
    monkeypatch.setattr("nbmemprof.searching.batch.max_batch", played)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=shown.append))
    shell = types.SimpleNamespace(user_ns={"step": print, "make": list, "number": 3})
    from nbmemprof.flags import parse

    verb.run(parse("step --setup make --low 2 --limit 8GiB --out best", verb.FLAGS, prog="%memprof max-batch"), shell)
    assert (asked["step"], asked["setup"], asked["low"], asked["limit_bytes"], asked["confirm"]) == (print, list, 2, 8 << 30, True)
    assert shown == [result]
    assert shell.user_ns["best"] is result
    with pytest.raises(FlagError, match="'number' is not a function"):
        verb.run(parse("number", verb.FLAGS, prog="%memprof max-batch"), shell)
    with pytest.raises(FlagError, match=r"'stepp' is not defined.*Did you mean 'step'"):
        verb.run(parse("stepp", verb.FLAGS, prog="%memprof max-batch"), shell)


def test_progress_on_a_terminal_is_one_line_that_is_wiped(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", None)
    with Line() as line:
        line.say("try 1 at 1")
        line.say("try 2")
    said = capsys.readouterr().err
    assert said.startswith("\rtry 1 at 1\rtry 2")
    assert said.endswith("\r     \r")


def test_progress_in_a_notebook_is_an_output_that_is_emptied(monkeypatch):
    shown: list = []

    class Handle:
        def update(self, made, raw):
            shown.append(made["text/plain"])

    def display(made, raw, display_id):
        shown.append(made["text/plain"])
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell, display=types.SimpleNamespace(display=display)))
    with Line() as line:
        line.say("one")
        line.say("two")
    assert shown == ["one", "two", ""]
