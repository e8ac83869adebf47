"""What every test may ask for, and the two rules on running: no hidden costs, no browser test skipped where one is required."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests (support, strategies) by their plain names

from support import COSTS, ROOT, chromium_path, cost_of, counts, has_gpu

_SPENT: dict[str, tuple[float, float]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what each test costs; skip what this machine can't run."""
    config.stash[COSTS] = [(item.nodeid, cost_of(item)) for item in items if counts(item)]
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("browser") and chromium_path() is None:
            item.add_marker(pytest.mark.skip(reason="needs Chromium (Debian: apt-get install chromium)"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Where a browser is required, a skipped browser test has failed; add up what each test took."""
    report = yield
    if report.skipped and item.get_closest_marker("browser") and os.environ.get("NBMEMPROF_REQUIRE_BROWSER") == "1":
        report.outcome, report.longrepr = "failed", f"skipped although NBMEMPROF_REQUIRE_BROWSER=1: {call.excinfo and call.excinfo.value}"
    if counts(item):
        before, declared = _SPENT.get(item.nodeid, (0.0, cost_of(item)))
        _SPENT[item.nodeid] = (before + report.duration, declared)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests took and declared, and those that took clearly longer than they declare."""
    if len(_SPENT) > 100:
        took, declared = (sum(column) for column in zip(*_SPENT.values(), strict=True))
        terminalreporter.write_line(f"tests took {took:.0f} s and declare {declared:.0f} s")
    over = sorted(((took, declared, name) for name, (took, declared) in _SPENT.items() if took > 2 * declared + 1), reverse=True)
    if over:
        terminalreporter.section("tests that cost more than they declare (@pytest.mark.cost)")
        for took, declared, name in over[:10]:
            terminalreporter.write_line(f"{took:6.1f} s, declared {declared:.1f} s: {name}")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The system's Chromium; the test skips without one."""
    path = chromium_path()
    if path is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return path


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of small real files."""
    return ROOT / "tests" / "fixtures"
