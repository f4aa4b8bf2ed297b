"""The page in a real browser: its scripts run, its charts are drawn, its tables sort."""

from __future__ import annotations

import os

import pytest

from fsdpbench.reports.cli import write_reports
from fsdpbench.reports.run import load_run
from tests.reports.browser import Browser, find_chromium
from tests.reports.example_runs import write_run
from tests.reports.test_html import hostile_records

pytestmark = pytest.mark.slow

COLUMN = """
(() => {
  const head = document.querySelector('#ranking-table th[data-key="KEY"]');
  return [...document.querySelectorAll('#ranking-table tbody tr')]
    .map((row) => row.cells[head.cellIndex].querySelector('.figure, .pill').textContent);
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_chromium()
    if executable is None:
        if os.environ.get("FSDPBENCH_REQUIRE_BROWSER") == "1":
            pytest.fail("no Chromium on the PATH, and FSDPBENCH_REQUIRE_BROWSER=1 demands one")
        pytest.skip("no Chromium on the PATH; install one to check the report's page")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def mixed_report(mixed_path, tmp_path_factory):
    return write_reports(load_run(mixed_path), tmp_path_factory.mktemp("report")).html


@pytest.fixture(scope="module")
def page(browser, mixed_report):
    opened = browser.page()
    opened.open(mixed_report)
    return opened


def column(page, key):
    return page.run(COLUMN.replace("KEY", key))


def test_every_chart_is_drawn(page):
    assert page.run("document.documentElement.dataset.plots") == "6"
    drawn = page.run("document.querySelectorAll('.plot .main-svg').length")
    assert drawn >= 6
    bars = "document.querySelectorAll('#plot-step-time .bars .point path').length"
    assert page.run(bars) == 9
    assert page.run("document.querySelectorAll('#plot-memory .bars .point path').length") == 27


def test_a_click_sorts_and_absent_values_stay_last(page):
    head = """document.querySelector('th[data-key="peak_device"]')"""
    page.run(f"{head}.querySelector('button').click()")
    ascending = column(page, "peak_device")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    numbers = [float(text.split()[0]) for text in ascending if text != "-"]
    assert numbers == sorted(numbers)
    assert ascending[-3:] == ["-"] * 3
    page.run(f"{head}.querySelector('button').click()")
    assert page.run(f"{head}.getAttribute('aria-sort')") == "descending"
    assert column(page, "peak_device") == [f"{n:.2f} GiB" for n in sorted(numbers)[::-1]] + [
        "-",
        "-",
        "-",
    ]


def test_the_keyboard_sorts(page):
    page.run("""document.querySelector('th[data-key="rate"] button').focus()""")
    page.press("Enter")
    assert page.run("""document.querySelector('th[data-key="rate"]').ariaSort""") == "ascending"
    rates = [float(text.replace(",", "")) for text in column(page, "rate") if text != "-"]
    assert rates == sorted(rates)
    assert page.run("document.querySelectorAll('#ranking-table th[aria-sort]').length") == 1


def test_the_filter_hides_rows(page):
    page.run(
        "(() => { const input = document.querySelector('[data-filters]'); input.value = 'OOM t2';"
        "input.dispatchEvent(new Event('input')); })()"
    )
    shown = "document.querySelectorAll('#ranking-table tbody tr:not([hidden])').length"
    assert page.run(shown) == 2
    assert page.run("document.querySelector('.filter output').textContent") == "2 of 12"
    page.run(
        "(() => { const input = document.querySelector('[data-filters]'); input.value = '';"
        "input.dispatchEvent(new Event('input')); })()"
    )
    assert page.run(shown) == 12


def test_another_trial_shows_its_memory(page):
    plot = "document.getElementById('plot-memory-over-time')"
    assert page.run(f"{plot}.dataset.trial") == "t000"
    peaks = f"Math.max(...{plot}.data.flatMap((trace) => trace.y))"
    first = page.run(peaks)
    page.run(
        "(() => { const picker = document.getElementById('memory-trial'); picker.value = '3';"
        "picker.dispatchEvent(new Event('change')); })()"
    )
    assert page.run(f"{plot}.dataset.trial") == "t003"
    assert page.run(peaks) != first


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_charts_take_the_colours_of_the_scheme(page, dark):
    scheme = "dark" if dark else "light"
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    wanted = "getComputedStyle(document.documentElement).getPropertyValue('--series-1').trim()"
    page.wait(f"document.getElementById('plot-step-time').data[0].marker.color === {wanted}")
    luminance = "getComputedStyle(document.body).backgroundColor"
    assert (page.run(luminance) == "rgb(16, 20, 27)") is dark


@pytest.mark.parametrize("width", [1400, 1024, 700, 390, 320])
def test_nothing_is_wider_than_the_window(page, width):
    page.resize(width, 900)
    page.wait(f"document.documentElement.scrollWidth <= {width}")


def test_print_opens_folds_and_forces_light(page):
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run("document.querySelectorAll('details:not([open])').length") == 0
    assert page.run("document.documentElement.classList.contains('printing')")
    page.run("dispatchEvent(new Event('afterprint'))")
    assert not page.run("document.documentElement.classList.contains('printing')")


def test_the_page_is_silent_and_asks_the_network_for_nothing(page, mixed_report):
    assert page.messages == []
    outside = [url for url in page.requests if not url.startswith("data:")]
    assert outside == [mixed_report.resolve().as_uri()]


def test_hostile_values_run_nothing_and_an_injected_script_is_refused(browser, tmp_path):
    path = write_run(tmp_path / "run", hostile_records())
    html = write_reports(load_run(path)).html
    marked = html.read_text().replace("<main>", "<main><script>window.injected = 1</script>", 1)
    html.write_text(marked)
    opened = browser.page()
    opened.open(html)
    assert opened.run("document.querySelectorAll('img, a:not([href^=\"#\"])').length") == 0
    assert opened.run("document.querySelectorAll('script').length") == 3 + 1
    assert opened.run("window.injected") is None
    assert len(opened.messages) == 1
    assert "Content Security Policy" in opened.messages[0]


def test_a_run_without_a_trial_opens(browser, tmp_path):
    opened = browser.page()
    opened.open(write_reports(load_run(write_run(tmp_path / "run", []))).html)
    assert opened.messages == []
    assert opened.run("document.documentElement.dataset.plots") == "0"
