// The page's own script: draws the charts from the data block, sorts and filters tables.
// When all charts are drawn, <html> carries data-plots (how many) and data-ready="true".
"use strict";
(() => {
  const NARROW_PIXELS = 440;
  const root = document.documentElement;
  root.classList.add("scripted");
  const data = JSON.parse(document.getElementById("report-data").textContent);

  // ---- colours: "@name" stands for the style sheet's --name -----------------------------------
  const withColors = (node, styles, isColor = false) => {
    if (typeof node === "string") {
      return isColor && node.startsWith("@")
        ? styles.getPropertyValue(`--${node.slice(1)}`).trim()
        : node;
    }
    if (Array.isArray(node)) return node.map((item) => withColors(item, styles, isColor));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(
      Object.entries(node).map(([key, value]) => [
        key,
        withColors(value, styles, key.toLowerCase().endsWith("color")),
      ]),
    );
  };

  const axis = (own = {}) => ({
    gridcolor: "@grid",
    zerolinecolor: "@grid",
    linecolor: "@line",
    tickfont: { color: "@muted" },
    automargin: true,
    separatethousands: true,
    ...own,
    title: { font: { color: "@muted", size: 12 }, standoff: 12, ...(own.title || {}) },
  });

  const layoutOf = (figure, narrow) => {
    const own = figure.layout;
    const yaxis = axis(own.yaxis);
    if (narrow && figure.narrow_labels.length && figure.traces.length) {
      yaxis.tickmode = "array";
      yaxis.tickvals = figure.traces[0].y;
      yaxis.ticktext = figure.narrow_labels;
    }
    return {
      font: { size: 12, color: "@text" },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 12, r: 18, t: 12, b: 12 },
      hoverlabel: { bgcolor: "@surface", bordercolor: "@line", font: { color: "@text" } },
      ...own,
      // where there is no room beside each other, every entry of the legend takes a line
      height: figure.height + (narrow ? 20 * Math.max(0, figure.traces.length - 4) : 0),
      xaxis: axis(own.xaxis),
      yaxis,
    };
  };

  const CONFIG = { displaylogo: false, displayModeBar: false };

  const draw = (figure) => {
    const element = document.getElementById(`plot-${figure.key}`);
    if (!element || !figure.traces.length) return null;
    const narrow = element.clientWidth < NARROW_PIXELS;
    const styles = getComputedStyle(root);
    const layout = withColors(layoutOf(figure, narrow), styles);
    layout.width = element.clientWidth;
    layout.font.family = styles.getPropertyValue("--sans").trim();
    if (layout.showlegend) {
      layout.legend = {
        orientation: "h",
        traceorder: "normal",
        x: 0,
        xanchor: "left",
        y: 1.02,
        yanchor: "bottom",
      };
      layout.margin.t = 8;
    }
    return Plotly.react(element, withColors(figure.traces, styles), layout, CONFIG);
  };

  // ---- memory over time: one trial at a time --------------------------------------------------
  const picker = document.getElementById("memory-trial");

  const memoryFigure = (curves) => ({
    key: "memory-over-time",
    height: 360,
    narrow_labels: [],
    traces: curves.series.map((series, index) => ({
      type: "scatter",
      mode: series.x.length < 3 ? "lines+markers" : "lines",
      name: series.name,
      x: series.x,
      y: series.y,
      line: {
        color: `@series-${(index % 8) + 1}`,
        width: 2,
        dash: series.lowest ? "dot" : "solid",
      },
      hovertemplate: `%{x:.1f} s: %{y} ${curves.unit}<extra>%{fullData.name}</extra>`,
    })),
    layout: {
      showlegend: true,
      hovermode: "x",
      xaxis: { title: { text: "seconds since the first sample" } },
      yaxis: { title: { text: `memory, ${curves.unit}` }, rangemode: "tozero" },
    },
  });

  const drawMemory = () => {
    if (!picker) return null;
    const curves = data.memory[Number(picker.value)];
    const plot = document.getElementById("plot-memory-over-time");
    const empty = document.getElementById("memory-empty");
    empty.textContent = curves.empty_reason;
    empty.hidden = curves.series.length > 0;
    plot.hidden = !curves.series.length;
    plot.dataset.trial = curves.trial_id;
    return draw(memoryFigure(curves));
  };

  if (picker) {
    picker.value = String(data.memory.findIndex((curves) => curves.series.length));
    picker.addEventListener("change", drawMemory);
  }

  const drawAll = () => {
    const pending = [...data.figures.map(draw), drawMemory()].filter((plot) => plot !== null);
    return Promise.all(pending).then((plots) => {
      root.dataset.plots = String(plots.length);
      root.dataset.ready = "true";
    });
  };

  // ---- tables ---------------------------------------------------------------------------------
  const sortKey = (row, index) => {
    const cell = row.cells[index];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = cell.querySelector(".figure, .pill").textContent.trim();
    return text === "-" ? null : text;
  };

  const compare = (left, right) => {
    if (typeof left === "number" && typeof right === "number") return left - right;
    return String(left).localeCompare(String(right), "en", { numeric: true });
  };

  const sortTable = (table, header) => {
    const index = header.cellIndex;
    const descending = header.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row, position) => ({ row, position, key: sortKey(row, index) }));
    keyed.sort((a, b) => {
      if (a.key === null || b.key === null) {
        return (a.key === null) - (b.key === null) || a.position - b.position; // absent stays last
      }
      return (descending ? -1 : 1) * compare(a.key, b.key) || a.position - b.position;
    });
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    body.append(...keyed.map(({ row }) => row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const button of table.querySelectorAll("th button")) {
      button.addEventListener("click", () => sortTable(table, button.closest("th")));
    }
  }

  for (const input of document.querySelectorAll("input[data-filters]")) {
    const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => texts[index].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      input.nextElementSibling.textContent = words.length ? `${shown} of ${rows.length}` : "";
    });
  }

  // ---- when the page changes its colours or its width -----------------------------------------
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    drawAll();
  });
  let width = innerWidth;
  let timer = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(drawAll, 150);
  });

  drawAll();
})();
