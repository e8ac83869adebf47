"""The first view in real front ends, offline: drawn, labelled, in light and dark, trusted or not, with a kernel or without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from _jupyter import Watched, server

pytest.importorskip("playwright")
pytestmark = pytest.mark.browser

CELLS = [
    "%load_ext nbmemprof\nimport nbmemprof as mp\nmp.load('two_devices.pickle.gz')",
    "%%memprof\nimport torch\nweights = torch.ones(1 << 20)\nparts = [weights * i for i in range(8)]",
    "mp.load('markup.pickle')",
]
PICTURES = 7  # two devices of the file (2 each), the profiled cell, the markup file, at least


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fixtures) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "two_devices.pickle.gz").write_bytes((fixtures / "views" / "two_devices.pickle.gz").read_bytes())
    (folder / "markup.pickle").write_bytes((fixtures / "views" / "markup_in_names.pickle").read_bytes())
    meta = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(metadata=meta, cells=[nbformat.v4.new_code_cell(c) for c in CELLS]), folder / "first.ipynb")
    return folder


@pytest.fixture(scope="module")
def jupyter(folder, tmp_path_factory):
    with server(folder, tmp_path_factory.mktemp("home")) as address:
        yield address


@pytest.fixture(scope="module")
def chrome(chromium):
    from _jupyter import FLAGS
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def watched(chrome):
    context = chrome.new_context(viewport={"width": 1200, "height": 2600}, service_workers="block", reduced_motion="reduce")
    page = Watched(context.new_page())
    yield page
    context.close()
    assert page.outside == []
    assert page.errors == []


@pytest.fixture(scope="module")
def ran(chrome, jupyter, folder):
    """Run the notebook in JupyterLab once, look in light and dark, save it; returns what was seen and the saved file."""
    context = chrome.new_context(viewport={"width": 1200, "height": 2600}, service_workers="block", reduced_motion="reduce")
    page = Watched(context.new_page())
    page.open(jupyter.format("lab/tree/first.ipynb"))
    page.run_all()
    seen = {"light": page.pictures(PICTURES)}
    page.theme("JupyterLab Dark")
    seen["dark"] = page.pictures(PICTURES)
    seen["dark ink"] = ink(page.page)
    page.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.page.wait_for_function("!document.querySelector('.jp-mod-dirty')", timeout=10_000)
    context.close()
    assert page.outside == []
    assert page.errors == []
    return seen, json.loads((folder / "first.ipynb").read_text())


def check(pictures: list[dict]) -> None:
    assert len(pictures) >= PICTURES
    for picture in pictures:
        assert picture["width"] > 300 and picture["shown"] > 300, picture
        assert picture["colours"] > 20, f"blank: {picture}"
        assert not picture["cut"], picture
        assert re.search(r"\d (B|KiB|MiB|GiB)", picture["alt"]), picture
    assert any(p["alt"].startswith("GPU 1: memory over time, peak 100.8 MiB") for p in pictures)


def ink(page) -> int:
    """How light the words outside the pictures are, 0 to 255: they take the theme's colour."""
    return min(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.querySelector('.nbm p')).color"))[:3]))


@pytest.mark.cost(14.8)
def test_lab_draws_it_in_light_and_dark(ran):
    seen, _ = ran
    check(seen["light"])
    check(seen["dark"])
    assert seen["dark ink"] > 150


def test_what_is_saved_is_small_and_speaks(ran):
    outputs = [cell["outputs"] for cell in ran[1]["cells"]]
    assert not [o for cell in outputs for o in cell if o["output_type"] == "error"], outputs
    for cell in outputs:
        shown = [o["data"] for o in cell if "data" in o and "text/html" in o["data"]]
        assert len(shown) == 1
        assert len(json.dumps(cell).encode()) <= 80_000
        html = "".join(shown[0]["text/html"])
        assert re.search(r'<img alt="[^"]*\d (MiB|KiB)', html)
        assert "peak" in "".join(shown[0]["text/plain"])


@pytest.mark.cost(5.1)
def test_notebook_7_shows_the_saved_file_trusted(ran, jupyter, watched):
    watched.open(jupyter.format("notebooks/first.ipynb"))
    check(watched.pictures(PICTURES))
    watched.theme("JupyterLab Dark")
    check(watched.pictures(PICTURES))
    assert ink(watched.page) > 150


@pytest.mark.cost(6)
@pytest.mark.parametrize("app", ["lab/tree", "notebooks"])
def test_an_untrusted_copy_without_a_kernel_is_whole(ran, jupyter, folder, watched, app):
    copy = json.loads(json.dumps(ran[1]))
    copy["metadata"] = {"kernelspec": {"name": "gone", "display_name": "Gone", "language": "python"}}  # another file: nobody has signed it
    (folder / "untrusted.ipynb").write_text(json.dumps(copy))
    watched.open(jupyter.format(f"{app}/untrusted.ipynb"), kernel=False)
    check(watched.pictures(PICTURES))
    trusted = watched.page.evaluate(
        "[...jupyterapp.shell.widgets('main')].find(w => w.content?.widgets).content.widgets.map(c => [c.model.type, c.model.trusted])"
    )
    assert trusted == [["code", False]] * 3
    words = watched.page.locator(".nbm details").first
    words.locator("summary").click()
    assert "peak allocated" in words.inner_text()
    assert watched.page.title() not in ("1", "owned")


@pytest.mark.cost(1.4)
def test_nbconvert_draws_it(ran, folder, tmp_path, watched):
    from nbconvert import HTMLExporter

    # nbconvert's own page asks a CDN for two scripts that nothing here needs
    html, _ = HTMLExporter(require_js_url="", mathjax_url="").from_filename(str(folder / "first.ipynb"))
    (tmp_path / "page.html").write_text(html)
    watched.page.goto((tmp_path / "page.html").as_uri())
    check(watched.pictures(PICTURES))


@pytest.mark.cost(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_zooms_without_a_kernel_or_network(fixtures, tmp_path, watched, scheme):
    import nbmemprof as mp

    mp.load(fixtures / "views" / "two_devices.pickle.gz").to_html(tmp_path / "report.html")
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    page.goto((tmp_path / "report.html").as_uri())
    canvas, host = page.locator("canvas").first, page.locator(".timeline").first
    page.wait_for_function("document.querySelector('.timeline').dataset.to")

    def window() -> tuple[float, float]:
        page.evaluate("() => new Promise(requestAnimationFrame)")
        return float(host.get_attribute("data-from")), float(host.get_attribute("data-to"))

    colours = page.evaluate(
        "() => { const c = document.querySelector('canvas'); return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size; }"
    )
    assert colours > 20
    whole = window()
    canvas.focus()
    page.keyboard.press("+")
    near = window()
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.keyboard.press("ArrowRight")
    assert window()[0] > near[0]
    page.keyboard.press("0")
    assert window() == whole
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    page.mouse.wheel(0, -400)
    assert window()[1] - window()[0] < whole[1] - whole[0]
    page.mouse.move(box["x"] + box["width"] / 2 + 20, box["y"] + 110)
    tip = host.locator(".tip")
    assert tip.is_visible() and re.search(r"allocated: [\d.]+ MiB", tip.inner_text())
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == (scheme == "dark")


@pytest.mark.cost(2.5)
def test_no_text_from_a_file_acts_in_the_report(fixtures, tmp_path, watched):
    import nbmemprof as mp

    mp.load(fixtures / "views" / "markup_in_names.pickle").to_html(tmp_path / "report.html")
    watched.page.on("dialog", lambda d: pytest.fail(d.message))
    watched.page.goto((tmp_path / "report.html").as_uri())
    watched.page.wait_for_function("document.querySelector('.timeline').dataset.to")
    assert watched.page.title().endswith("nbmemprof")
    assert "javascript:alert(1):3" in watched.page.inner_text("body")
    assert watched.page.locator("iframe").count() == 0
