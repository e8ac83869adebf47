"""In a real kernel: what a failed cell, the output history and a re-run loading cell keep is found, sized to the byte and let go; the user's names stay."""

from __future__ import annotations

import json

import pytest
from test_plain_cell import kernel, text_of

MIB = 1 << 20
FAIL = """%%memprof
def _inner(batch):
    work = torch.empty(3 << 20, dtype=torch.uint8, device=dev)
    raise ValueError("label 7 is not in range(5)")

def run():
    batch = torch.empty(2 << 20, dtype=torch.uint8, device=dev)
    _inner(batch)

run()"""
ALIVE = "report(alive())"
SETUP = """import gc, json, sys, torch
import nbmemprof as mp
%load_ext nbmemprof
dev = 'DEVICE'
torch.zeros(1, device=dev)
def report(x):
    print(json.dumps(x))
def alive():
    return int(mp.holders(device=dev)['counted_bytes'].sum())
def by_holder():
    return mp.holders(device=dev, by='holder').select('kind', 'holder', 'size_bytes', 'releasable').rows()"""
LOAD = "%%memprof\nDATA = torch.empty(4 << 20, dtype=torch.uint8, device=dev)"
CELLS = {
    "setup": SETUP,
    "mine": "mine = torch.ones(1 << 18, device=dev)\nalso_out = torch.empty(6 << 20, dtype=torch.uint8, device=dev)\nreport(alive())",
    "fail": FAIL,
    "meta": "report([_memprof.meta['traceback_bytes'], _memprof.meta['traceback_text']])",
    "out 5 MiB": "torch.empty(5 << 20, dtype=torch.uint8, device=dev)",
    "out 7 MiB": "[torch.empty(7 << 20, dtype=torch.uint8, device=dev)]",
    "out of mine": "also_out",
    "number": "40 + 2",
    "holders": "report(by_holder())",
    "who": "%memprof who",
    "each": "%memprof who --each --top 2",
    "dry": "%memprof release",
    "after dry": ALIVE,
    "yes": "%memprof release --yes",
    "after": ALIVE,
    "names": "report([float(mine.sum()), also_out.nbytes, sorted(Out), Out[8], _, '_5' in globals(), '_8' in globals(), hasattr(sys, 'last_value')])",
    "again": "%memprof release",
    "tb": "%tb",
    "ours is _": "_ = torch.empty(1 << 20, dtype=torch.uint8, device=dev); err = None",
    "caught": "try:\n    run()\nexcept ValueError as e:\n    err = e",
    "user keeps": "%memprof release --yes",
    "still theirs": "report([_.nbytes, sorted(err.__traceback__.tb_next.tb_frame.f_locals)])",
    "let the error go": "del err, _",
    "load": LOAD,
    "load again": LOAD,
    "replaced": "report(_memprof.meta.get('replaced'))",
    "load third": LOAD,
    "del first": "%%memprof\ndel DATA\nDATA = torch.empty(4 << 20, dtype=torch.uint8, device=dev)",
    "not replaced": "report(_memprof.meta.get('replaced'))",
    "fail again": FAIL,
    "debugged": "%memprof release --yes",
    "after debugged": ALIVE,
    **{f"cell {i}": f"%%memprof\nx = torch.ones(1000, requires_grad=True, device=dev)\n(x * {i}).sum().backward()\nprint({i})" for i in range(30)},
    "flat": "report([counts[13], counts[21], counts[29], alive()])",
}
# count living objects at the end of profiled cells; the first ones import and compile what stays
for _at in (13, 21, 29):
    CELLS[f"cell {_at}"] += f"\nx = None; gc.collect(); counts = {{**globals().get('counts', {{}}), {_at}: len(gc.get_objects())}}"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cells(request, tmp_path_factory):
    sources = [source.replace("'DEVICE'", repr(request.param)) for source in CELLS.values()]
    return dict(zip(CELLS, kernel(sources, tmp_path_factory.mktemp("release")), strict=True))


def said(cells, name: str) -> str:
    return "".join(text_of(o) for o in cells[name].outputs)


def told(cells, name: str):
    return json.loads(said(cells, name))


@pytest.mark.cost(16)
def test_a_failed_cell_says_what_its_traceback_keeps(cells):
    size, text = told(cells, "meta")
    assert size == 5 * MIB
    assert text == "The traceback of this error keeps 5 MiB of tensors alive (work in _inner (In[3]:4), batch in run (In[3]:8)). %memprof release --yes lets go of them."
    assert text in said(cells, "fail")


def test_what_the_notebook_holds_is_found_to_the_byte(cells):
    rows = {holder: (kind, size, releasable) for kind, holder, size, releasable in told(cells, "holders")}
    assert rows.pop("work in _inner (In[3]:4), kept by the last traceback (sys.last_traceback)") == ("traceback", 3 * MIB, True)
    assert rows.pop("batch in run (In[3]:8), kept by the last traceback (sys.last_traceback)") == ("traceback", 2 * MIB, True)
    assert rows == {"mine": ("variable", MIB, False), "also_out": ("variable", 6 * MIB, False), "Out[5]": ("output", 5 * MIB, True), "Out[6][…]": ("output", 7 * MIB, True)}


def test_who_shows_a_sentence_and_a_table(cells):
    text = said(cells, "who")
    assert text.startswith("24 MiB alive in 6 tensors: 12 MiB by the output history, 7 MiB by your variables, 5 MiB by the last traceback. %memprof release would give 17 MiB back.")
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["7", "6", "5", "3", "2", "1"]
    html = cells["who"].outputs[0].data["text/html"]
    assert "<td>also_out</td>" in html
    assert "2 of 6 rows are shown" in said(cells, "each")


def test_a_dry_run_changes_nothing(cells):
    text = said(cells, "dry")
    assert text.startswith("17 MiB of the 24 MiB of tensors alive are held by the notebook alone:")
    assert "Out[6]" in text
    assert "sys.last_traceback" in text
    assert told(cells, "after dry") == 24 * MIB


def test_yes_lets_go_to_the_byte_and_leaves_the_users_names(cells):
    assert said(cells, "yes").startswith("17 MiB came back: 24 MiB of tensors were alive, 7 MiB are now.")
    assert told(cells, "after") == told(cells, "mine") == 7 * MIB
    assert told(cells, "names") == [1 << 18, 6 * MIB, [7, 8], 42, 42, False, True, False]
    assert said(cells, "again").startswith("Nothing to let go of: none of the 7 MiB")
    assert said(cells, "tb").strip() == "No traceback available to show."


def test_what_a_name_of_the_users_holds_stays(cells):
    assert said(cells, "user keeps").startswith("0 B came back: 13 MiB of tensors were alive")
    assert told(cells, "still theirs") == [MIB, ["batch"]]


def test_a_loading_cell_run_again_names_the_old_value(cells):
    assert told(cells, "replaced") == [{"name": "DATA", "size_bytes": 4 * MIB}]
    assert "4 MiB of the peak were the previous value of DATA" in said(cells, "load third")
    assert "peak" in said(cells, "del first")
    assert "previous value" not in said(cells, "load") + said(cells, "del first")
    assert told(cells, "not replaced") is None


def test_it_works_again_and_the_kernel_goes_on(cells):
    assert said(cells, "debugged").startswith("5 MiB came back")
    assert told(cells, "after debugged") == 11 * MIB
    for i in range(30):
        assert f"{i}\n" in said(cells, f"cell {i}")
        assert "peak" in said(cells, f"cell {i}")


def test_profiled_cells_leave_no_objects_behind(cells):
    early, middle, late, alive = told(cells, "flat")
    assert alive == 11 * MIB
    assert (late - early) / 16 < 40, f"{middle - early} more objects after 8 cells, {late - early} after 16"
