"""The HTML report: one file that works without network, its scripts and charts embedded.

Every value reaches the page through Jinja's autoescape or as escaped JSON in a data block. The
page's content policy allows exactly the two scripts embedded here, by their hashes, and no
request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fsdpbench import __version__
from fsdpbench.bench.plain_text import clean_text
from fsdpbench.reports.curves import MemoryCurves, plan_loss_curves, plan_memory_curves
from fsdpbench.reports.facts import (
    build_commands,
    build_environment,
    build_headlines,
    build_measurement,
    build_subtitle,
)
from fsdpbench.reports.failures import build_failures, build_not_started
from fsdpbench.reports.plots import Figure, plan_charts, plotly_javascript
from fsdpbench.reports.ranking import build_ranking
from fsdpbench.reports.run import Run
from fsdpbench.reports.tables import Table

FOLDED_ROWS = 12
"""A table of refused points longer than this is folded away until it is asked for."""


def render_html(run: Run) -> str:
    """Render the whole page of a run."""
    environment = Environment(
        loader=PackageLoader("fsdpbench.reports"),
        autoescape=True,
        finalize=lambda value: clean_text(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda text: breakable(clean_text(text))
    figures = [*plan_charts(run.records), plan_loss_curves(run)]
    memory = plan_memory_curves(run)
    scripts = [plotly_javascript().replace("</script", "<\\/script"), _template_text("app.js")]
    data = {
        "figures": [_figure_data(figure) for figure in figures],
        "memory": [_memory_data(curves) for curves in memory],
    }
    ranking = build_ranking(run.records)
    return environment.get_template("page.html.j2").render(
        run=run,
        title=_title(run),
        subtitle=build_subtitle(run.name, run.records, run.sweep),
        version=__version__,
        policy=_content_policy(scripts),
        style=Markup(_template_text("style.css")),
        scripts=[Markup(script) for script in scripts],
        data=Markup(embed_json(data)),
        headlines=build_headlines(run.records),
        ranking=ranking,
        shares=_shares(ranking),
        figures=figures,
        memory=memory,
        has_memory=any(curves.series for curves in memory),
        failures=build_failures(run.records),
        not_started=build_not_started(run.records),
        folded_rows=FOLDED_ROWS,
        fact_groups=(
            ("Commands", build_commands(run.records, run.sweep)),
            ("Measurement", build_measurement(run.records)),
            ("Environment", build_environment(run.records)),
        ),
    )


def breakable(text: str) -> Markup:
    """Escape a text whose words move whole, and break after `_./` where a line is too short."""
    words = (re.sub(r"([_./])(?=.)", r"\1<wbr>", str(escape(word))) for word in text.split())
    return Markup(" ".join(f'<span class="word">{word}</span>' for word in words))


def embed_json(data: Any) -> str:
    """Write strict JSON that cannot end the script element around it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _figure_data(figure: Figure) -> dict[str, Any]:
    fields = ("key", "traces", "layout", "height", "narrow_labels")
    return {name: getattr(figure, name) for name in fields}


def _memory_data(curves: MemoryCurves) -> dict[str, Any]:
    return {**vars(curves), "series": [vars(series) for series in curves.series]}


def _title(run: Run) -> str:
    models = dict.fromkeys(record.model for record in run.records if record.model)
    named = run.sweep.get("model")
    if not models and isinstance(named, str):
        models = {named: None}
    return ", ".join(models) or run.name


def _shares(table: Table) -> dict[str, int]:
    """Map each row to its tokens/s in per cent of the best, for the bar behind the figure.

    A run that trained nothing has no such column and so no bars.
    """
    if all(column.key != "rate" for column in table.columns):
        return {}
    index = table.column_index("rate")
    rates = {row.key: row.cells[index].value or 0.0 for row in table.rows}
    best = max(rates.values(), default=0.0)
    return {key: round(100 * rate / best) if best else 0 for key, rate in rates.items()}


def _content_policy(scripts: Sequence[str]) -> str:
    hashes = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _template_text(name: str) -> str:
    return (files("fsdpbench.reports") / "templates" / name).read_text(encoding="utf-8")
