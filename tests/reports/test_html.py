from __future__ import annotations

import itertools
import json
import re
import time
from html.parser import HTMLParser

import pytest

from fsdpbench.bench.records import Evidence, Record, TrialStatus, Verdict
from fsdpbench.reports.html import breakable, embed_json, render_html
from fsdpbench.reports.plots import plotly_javascript
from fsdpbench.reports.run import load_run
from tests.reports.example_runs import (
    SYNC_RUNS,
    make_cpu_record,
    make_failed,
    make_mixed_records,
    make_record,
    write_run,
)

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m"


class Page(HTMLParser):
    """The text and the elements of a page, script and style contents apart."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.raw, self._inside = [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id", tag) if tag in ("script", "style") else None

    def handle_data(self, data):
        if self._inside:
            self.raw.setdefault(self._inside, []).append(data)
        else:
            self.texts.append(data)

    def handle_endtag(self, tag):
        self._inside = None

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def render(tmp_path, records, **options):
    return render_html(load_run(write_run(tmp_path / "run", records, **options)))


@pytest.fixture(scope="module")
def mixed_html(mixed_run):
    return render_html(mixed_run)


@pytest.fixture(scope="module")
def mixed_page(mixed_html):
    return Page(mixed_html)


@pytest.mark.parametrize(
    "text",
    [
        "20,480 tokens/s",
        "tokens/s/GPU",
        "peak reserved",
        "18.00 GiB",
        "-11.1 %",
        "ok, unstable",
        "The same in every trial: max_tokens_per_mb=4096.",
        "rank 1 ran out of GPU memory in the backward pass",
        "set gradient_checkpointing: true",
        "logs/rank1/stderr.log:214",
        "Tried to allocate 4.64 GiB",
        "must divide num_key_value_heads=8. Use 1, 2, 4 or 8.",
        "NVIDIA H200",
        "fsdpbench sweep --axis parallel=fsdp:d2,fsdp:t2",
        "0123456789ab",
    ],
)
def test_the_page_says(mixed_page, text):
    assert text in mixed_page.text


def test_the_page_refers_to_nothing_outside(mixed_page):
    for tag, attributes in mixed_page.elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    style = "".join(mixed_page.raw["style"])
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for t, a in mixed_page.elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


def test_headings_labels_and_captions(mixed_page):
    elements = mixed_page.elements
    headings = [int(tag[1]) for tag, _ in elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in elements:
        assert attributes.get("aria-labelledby", ids[0]) in ids
    tables = sum(tag == "table" for tag, _ in elements)
    assert tables == sum(tag == "caption" for tag, _ in elements) == 2
    assert all(a.get("scope") == "col" for tag, a in elements if tag == "th")
    charts = [a for _, a in elements if a.get("role") == "img"]
    assert len(charts) == 6
    assert all(chart["aria-label"].startswith("Chart: ") for chart in charts)


def test_every_cell_carries_its_column(mixed_page):
    cells = [attributes for tag, attributes in mixed_page.elements if tag == "td"]
    assert len(cells) == 12 * 14 + 6
    assert all(cell["data-label"] for cell in cells)


def test_absent_cells_say_why(mixed_page):
    reasons = {a["title"] for tag, a in mixed_page.elements if tag == "td" and "title" in a}
    assert "not measured: the trial ended as oom" in reasons


def test_on_cpu_one_sentence_stands_for_the_gpu_columns(tmp_path):
    page = Page(render(tmp_path, [make_cpu_record(0), make_cpu_record(1)]))
    assert page.text.count("no device memory to report") == 1
    assert "peak reserved" not in page.text


def hostile_records():
    verdict = Verdict(
        failure_class="other",
        cause=ATTACK,
        phase=ATTACK,
        remedies=[ATTACK],
        evidence=[Evidence(file=ATTACK, line=1, text=ATTACK)],
        rule=ATTACK,
    )
    axes = {ATTACK: ATTACK, "parallel": "fsdp:d2"}
    record = make_record(
        0,
        axes=axes,
        model=ATTACK,
        environment={ATTACK: ATTACK},
        workload={"data": ATTACK},
        command=[ATTACK],
        phases={ATTACK: 0.1},
        attention_kernel=ATTACK,
        mfu_formula=ATTACK,
        commit=ATTACK,
        started_at=ATTACK,
    )
    failed = make_failed(1, TrialStatus.CRASHED, axes={**axes, "parallel": ATTACK})
    failed = failed.model_copy(update={"verdict": verdict, "reason": ATTACK})
    invalid = Record(id="../" + ATTACK, status=TrialStatus.INVALID, axes=axes, reason=ATTACK)
    return [record, failed, invalid, make_record(2, axes={**axes, "parallel": "fsdp:t2"})]


def test_no_value_becomes_markup(tmp_path):
    page = Page(render(tmp_path, hostile_records()))
    assert sum(tag == "script" for tag, _ in page.elements) == 3
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [name for _, a in page.elements for name in a if name.startswith("on")]
    assert "alert(1)" in page.text
    assert "\x1b" not in page.text
    data = json.loads("".join(page.raw["report-data"]))
    assert len(data["figures"]) == 5


def test_embedded_json_cannot_end_its_element():
    text = embed_json({"a": "</script><!--&"})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!--&"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json({"a": float("nan")})


def test_names_may_break_after_their_separators():
    assert str(breakable("a_b.c/<d>  +e")) == (
        '<span class="word">a_<wbr>b.<wbr>c/<wbr>&lt;d&gt;</span> <span class="word">+e</span>'
    )


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([], "No trial has been started."),
        ([make_failed(0, TrialStatus.HANG)], "None of the 1 trials that were started finished."),
        ([make_record(0)], "1 of 1 started trials measured"),
        ([Record(id="a", status=TrialStatus.INVALID, reason="no")], "refused before a process"),
        ([Record(id="bare", status=TrialStatus.OK)], "No training step was measured."),
    ],
    ids=["nothing", "no ok", "one", "all refused", "empty record"],
)
def test_small_runs_render(tmp_path, records, text):
    assert text in Page(render(tmp_path, records)).text


@pytest.mark.parametrize("records", SYNC_RUNS.values(), ids=SYNC_RUNS)
def test_runs_that_send_weights_render(tmp_path, records):
    page = Page(render(tmp_path, records))
    rates = [a for tag, a in page.elements if tag == "td" and a["data-label"] == "tokens/s"]
    assert all("--share: " in cell["style"] for cell in rates)
    sends = any(record.sync is not None for record in records)
    assert bool(rates) == (not sends or any(record.step_seconds for record in records))
    assert ("Pause of a weight update" in page.text) == sends
    assert len(json.loads("".join(page.raw["report-data"]))["figures"]) == 5 + sends


def test_problems_are_shown_on_top(tmp_path):
    path = write_run(tmp_path / "run", [make_record(0)])
    with (path / "results.jsonl").open("a") as file:
        file.write('{"id": "torn')
    assert "torn last line, skipped" in Page(render_html(load_run(path))).text


def test_a_page_of_five_hundred_trials_stays_light(tmp_path):
    records = [
        make_record(index, axes={"parallel": f"fsdp:d{index}", "lr": index / 7})
        for index in range(450)
    ]
    records += [make_failed(450 + index, TrialStatus.OOM) for index in range(50)]
    path = write_run(tmp_path / "run", records, num_samples=40, ranks=1)
    start = time.process_time()
    html = render_html(load_run(path))
    assert time.process_time() - start < 10
    assert len(html) - len(plotly_javascript()) < 4_000_000


def test_a_second_rendering_is_the_same(mixed_run, mixed_html):
    assert render_html(mixed_run) == mixed_html
    assert len(make_mixed_records()) == len(mixed_run.records)
