(() => {
  "use strict";
  const given = document.getElementById("figures");
  let figures = JSON.parse(given.textContent);
  // Okabe and Ito's colors, which people tell apart whatever their eyes are like. The first is the lighter blue in the dark.
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#6a51a3"];
  const DARK = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#0072b2", "#9a9a9a", "#a58ad6"];
  const color = (index) => (document.documentElement.dataset.theme === "dark" ? DARK : LIGHT)[index % LIGHT.length];
  const root = document.getElementById("curves");
  const state = { axis: "steps", smoothing: 0.0 };
  const shown = [];

  const element = (name, text, parent) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  };

  // Steps as samples, tokens or seconds, by the line between the two steps that are known. Runs that are compared have
  // their own, and their lines name them by number.
  const place = (step, run) => {
    const axes = run === undefined ? figures.axes : figures.runs[run].axes;
    const from = axes.steps, to = axes[state.axis];
    if (state.axis === "steps" || !from.length) return step;
    let low = 0, high = from.length - 1;
    if (step <= from[0]) return from[0] ? to[0] * step / from[0] : to[0];
    if (step >= from[high]) return to[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (from[middle] <= step) low = middle; else high = middle;
    }
    return to[low] + (to[high] - to[low]) * (step - from[low]) / (from[high] - from[low]);
  };

  // An exponential mean, corrected at its beginning; gaps stay gaps.
  const smoothed = (values, weight) => {
    let mean = 0, seen = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      seen += 1;
      return mean / (1 - weight ** seen);
    });
  };

  const joined = (lines) => {
    const placed = lines.map((line) => line.x.map((step) => place(step, line.run)));
    const x = [...new Set(placed.flat())].sort((a, b) => a - b);
    const at = new Map(x.map((value, index) => [value, index]));
    const rows = lines.map((line, number) => {
      const row = new Array(x.length).fill(undefined);
      const values = line.smooth && state.smoothing ? smoothed(line.y, state.smoothing) : line.y;
      placed[number].forEach((value, index) => { row[at.get(value)] = values[index]; });
      return row;
    });
    return [x, rows];
  };

  const colors = () => {
    const style = getComputedStyle(document.documentElement);
    return { ink: style.getPropertyValue("--soft").trim(), line: style.getPropertyValue("--line").trim() };
  };

  const words = (value) => value === null || value === undefined ? "–"
    : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3)
    : String(Number(value.toPrecision(5)));

  const xWords = (value) => state.axis === "seconds"
    ? (value >= 3600 ? (value / 3600).toPrecision(3) + " h" : value >= 60 ? (value / 60).toPrecision(3) + " min" : value.toPrecision(3) + " s")
    : Math.round(value).toLocaleString("en");

  const marks = (chart, lines, offset) => (u) => {
    const context = u.ctx;
    context.save();
    context.setLineDash([4, 4]);
    context.strokeStyle = colors().ink;
    for (const step of figures.resumed) {
      const x = u.valToPos(place(step), "x", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
      context.beginPath();
      context.moveTo(x, u.bbox.top);
      context.lineTo(x, u.bbox.top + u.bbox.height);
      context.stroke();
    }
    context.setLineDash([]);
    lines.forEach((line, index) => {
      if (line.best === undefined || !u.series[index + offset].show) return;
      const x = u.valToPos(place(line.x[line.best], line.run), "x", true), y = u.valToPos(line.y[line.best], "y", true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
      context.beginPath();
      context.arc(x, y, 5 * devicePixelRatio, 0, 2 * Math.PI);
      context.lineWidth = 2 * devicePixelRatio;
      context.strokeStyle = color(line.color ?? index);
      context.stroke();
    });
    context.restore();
  };

  const build = (entry) => {
    const { chart, box } = entry;
    const old = entry.plot, scale = old && old.scales.x, known = old && old.data[0];
    const isZoomed = old && entry.axis === state.axis && (scale.min > known[0] || scale.max < known[known.length - 1]);
    const kept = isZoomed ? { min: scale.min, max: scale.max } : null;
    entry.axis = state.axis;
    if (old) old.destroy();
    const [x, rows] = joined(chart.lines);
    let drawn = rows;
    if (chart.stacked) {
      const sums = new Array(x.length).fill(0);
      drawn = rows.map((row) => row.map((value, index) => (sums[index] += value || 0))).reverse();
    }
    const order = chart.lines.map((_, index) => chart.stacked ? chart.lines.length - 1 - index : index);
    const few = x.length < 60;
    const series = order.map((index) => ({
      label: chart.lines[index].name,
      stroke: color(chart.lines[index].color ?? index),
      dash: chart.lines[index].dash,
      fill: chart.stacked ? color(index) + "b0" : undefined,
      width: 1.6,
      spanGaps: true,
      points: { show: !chart.stacked && chart.lines[index].x.length < 60, size: few ? 6 : 4 },
      value: (u, value, number, at) => {
        if (at === null || at === undefined) return "–";
        const row = rows[index];
        for (let near = at; near >= 0; near -= 1) if (row[near] !== undefined) return words(row[near]);
        return "–";
      },
    }));
    const { ink, line } = colors();
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    const isLog = entry.log && drawn.every((row) => row.every((value) => value === null || value === undefined || value > 0));
    entry.plot = new uPlot({
      width: Math.max(220, box.clientWidth),
      height: chart.tall || chart.title === "Loss" ? 320 : 220,
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 }, sync: { key: "run" } },
      scales: {
        x: { time: false },
        y: { distr: isLog ? 3 : 1, range: chart.from_zero && !isLog ? (u, low, high) => [0, high > 0 ? high * 1.05 : 1] : undefined },
      },
      series: [{ label: state.axis, value: (u, value) => value === null || value === undefined ? "–" : xWords(value) }, ...series],
      axes: [
        { ...axis, values: (u, values) => values.map(xWords), space: 70 },
        { ...axis, size: 62, values: (u, values) => values.map((value) => value === null ? "" : words(value)) },
      ],
      hooks: { draw: chart.stacked ? [] : [marks(chart, chart.lines, 1)] },
    }, [x, ...drawn], entry.canvas);
    if (isZoomed) entry.plot.setScale("x", kept);
  };

  const keys = (entry) => (event) => {
    const plot = entry.plot, number = plot.data[0].length;
    if (!number) return;
    if (event.key === "Escape") { plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][number - 1] }); return; }
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -number, End: number }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const now = plot.cursor.idx === null || plot.cursor.idx === undefined ? (move > 0 ? -1 : number) : plot.cursor.idx;
    const next = Math.min(number - 1, Math.max(0, now + move));
    plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: plot.height / 3 });
  };

  const add = (chart, parent) => {
    const box = element("div", "", parent);
    box.className = "chart";
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", chart.title + ": arrow keys move along the curve, Escape shows all of it");
    const title = element("h3", "", box);
    element("span", chart.title, title);
    const entry = { chart, box, canvas: element("div", "", box), log: false };
    if (chart.log) {
      const label = element("label", "", title);
      const tick = element("input", "", label);
      tick.type = "checkbox";
      label.append(" logarithmic");
      tick.addEventListener("change", () => { entry.log = tick.checked; build(entry); });
    }
    box.addEventListener("keydown", keys(entry));
    shown.push(entry);
    return entry;
  };

  const control = (text, parent) => { const label = element("label", "", parent); label.append(text); return label; };

  const controls = () => {
    const bar = element("div", "", root);
    bar.className = "controls";
    const over = element("select", "", control("Over", bar));
    for (const name of Object.keys(figures.axes)) element("option", name, over);
    over.addEventListener("change", () => { state.axis = over.value; shown.forEach(build); });
    const label = control("Smoothing", bar), slider = element("input", "", label), told = element("output", "0", label);
    Object.assign(slider, { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
    slider.addEventListener("input", () => {
      state.smoothing = Number(slider.value);
      told.textContent = slider.value;
      shown.filter((entry) => entry.chart.lines.some((line) => line.smooth)).forEach(build);
    });
    const theme = element("button", "", bar);
    const paint = (dark) => {
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      theme.textContent = dark ? "Light" : "Dark";
    };
    const system = matchMedia("(prefers-color-scheme: dark)");
    paint(system.matches);
    theme.addEventListener("click", () => { paint(document.documentElement.dataset.theme !== "dark"); shown.forEach(build); });
    system.addEventListener("change", () => { paint(system.matches); shown.forEach(build); });
    addEventListener("beforeprint", () => { paint(false); shown.forEach(build); });
    element("span", "Drag to zoom, double-click to see all", bar).className = "hint";
  };

  // Charts by their order on the page; those that a run has only later are added below the others.
  const parts = () => [...figures.charts.map((chart) => ["charts", chart]), ...figures.telemetry.map((chart) => ["telemetry", chart])];
  const places = {};
  const placeOf = (kind, isFirst) => {
    if (isFirst) return element("div", "", root);
    if (!places[kind]) {
      if (kind === "telemetry") element("h2", "Devices", root);
      places[kind] = element("div", "", root);
      places[kind].className = "grid";
    }
    return places[kind];
  };
  const draw = () => {
    const used = new Set();  // two charts may have one title
    for (const [kind, chart] of parts()) {
      let entry = shown.find((each) => !used.has(each) && each.kind === kind && each.chart.title === chart.title);
      if (!entry) entry = add(chart, placeOf(kind, !shown.length));
      Object.assign(entry, { chart, kind });
      used.add(entry);
    }
    shown.forEach(build);
    document.documentElement.dataset.drawn = String(shown.length);
  };

  controls();
  draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; shown.forEach(build); } });

  // A server shows the page while the run goes on: what changes is asked for, and what is being looked at stays.
  const renew = async () => {
    try {
      const answer = await fetch(location.pathname.replace(/\/?$/, "/figures.json"), { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      if (text !== renew.last) {
        renew.last = text;
        figures = JSON.parse(text);
        document.querySelector("p.about").textContent = figures.about;
        const cards = document.querySelector("dl.cards");
        cards.replaceChildren(...figures.headline.map(([label, value, note]) => {
          const card = element("div");
          element("dt", label, card);
          element("dd", value, card);
          if (note) element("dd", note, card).className = "note";
          return card;
        }));
        draw();
        document.documentElement.dataset.renewed = String(Number(document.documentElement.dataset.renewed || 0) + 1);
      }
      document.documentElement.dataset.lost = "";
    } catch (error) {
      document.documentElement.dataset.lost = "yes";
    }
    setTimeout(renew, 3000);
  };
  if (given.dataset.live !== undefined) setTimeout(renew, 1000);
})();
