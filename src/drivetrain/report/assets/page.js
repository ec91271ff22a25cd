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

  // A tick is a round number: it has few digits, and beside an axis there is room for few.
  const tick = (value) => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4)
    ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(5)));

  // Of few steps the axis has halves, too: there is no step there, and rounded they would stand there twice.
  const onAxis = (value) => state.axis !== "seconds" && value % 1 ? "" : xWords(value);
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

  // A curve that stays at 0 is drawn between -1 and 1, not between 0 and 100.
  const around = (low, high) => low === null ? [null, null] : low === 0 && high === 0 ? [-1, 1] : uPlot.rangeNum(low, high, 0.1, true);

  const build = (entry) => {
    const { chart, box } = entry;
    const old = entry.plot, scale = old && old.scales.x, known = old && old.data[0];
    const isZoomed = old && entry.axis === state.axis && scale.min != null && (scale.min > known[0] || scale.max < known[known.length - 1]);
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
        y: { distr: isLog ? 3 : 1, range: isLog ? undefined : (u, low, high) => chart.from_zero ? [0, high > 0 ? high * 1.05 : 1] : around(low, high) },
      },
      series: [{ label: state.axis, value: (u, value) => value === null || value === undefined ? "–" : xWords(value) }, ...series],
      axes: [
        { ...axis, label: state.axis, size: 34, labelSize: 18, labelFont: axis.font, values: (u, values) => values.map(onAxis), space: 70 },
        { ...axis, size: 62, values: (u, values) => values.map((value) => value === null ? "" : tick(value)) },
      ],
      hooks: { draw: chart.stacked ? [] : [marks(chart, chart.lines, 1)] },
    }, [x, ...drawn], entry.canvas);
    if (isZoomed) entry.plot.setScale("x", kept);
    fingers(entry.plot);
  };

  // A finger that moves sideways zooms as a mouse does; one that moves up or down scrolls the page.
  const fingers = (plot) => {
    const over = plot.over;
    let last = -1e9;
    over.style.touchAction = "pan-y";
    const mouse = (kind, { clientX, clientY }, target) =>  // uPlot takes a drag without movement for none
      target.dispatchEvent(new MouseEvent(kind, { clientX, clientY, movementX: 1, button: 0, bubbles: true }));
    const on = (kind, does) => over.addEventListener(kind, (event) => { if (event.pointerType === "touch") does(event); });
    on("pointerdown", (event) => {
      if (event.timeStamp - last < 350) mouse("dblclick", event, over);
      last = event.timeStamp;
      mouse("mousedown", event, over);
    });
    on("pointermove", (event) => mouse("mousemove", event, over));
    on("pointerup", (event) => mouse("mouseup", event, document));
    on("pointercancel", (event) => {  // the page scrolls
      plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      mouse("mouseup", event, document);
    });
  };

  // Around the point of the cursor; without one, around the middle.
  const zoom = (plot, factor) => {
    const x = plot.data[0], { min, max } = plot.scales.x, at = plot.cursor.idx;
    const middle = at === null || at === undefined ? (min + max) / 2 : x[at], whole = x[x.length - 1] - x[0];
    const span = Math.min(whole, (max - min) * factor), low = Math.min(Math.max(x[0], middle - span / 2), x[0] + whole - span);
    plot.setScale("x", { min: low, max: low + span });
  };

  const keys = (entry) => (event) => {
    const plot = entry.plot, number = plot.data[0].length;
    if (!number) return;
    if (event.key === "Escape") { plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][number - 1] }); return; }
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (factor && !event.ctrlKey && !event.metaKey) { zoom(plot, factor); return; }
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
    box.setAttribute("aria-label", chart.title + ": arrow keys move along the curve, + and - zoom, Escape shows all of it");
    const title = element("h3", "", box);
    element("span", chart.title, title);
    if (chart.note) element("p", chart.note, box).className = "told";
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
    element("span", `Drag to zoom, double-${matchMedia("(pointer: coarse)").matches ? "tap" : "click"} to see all`, bar).className = "hint";
  };

  // What happened on the clock: a band for each start, its height by what the time went into, and marks for faults.
  const part = (name, title) => {
    const known = document.getElementById(name);
    if (known) { known.replaceChildren(); return known; }
    const made = element("section", "", document.getElementById("drawn"));
    made.id = name;
    return made;
  };
  const at = (box, left, right) => { box.style.left = `${100 * left}%`; box.style.width = `${Math.max(100 * (right - left), 0.05)}%`; };
  const drawTimeline = () => {
    const seen = figures.timeline;
    if (!seen) return;
    const root = part("timeline");
    element("h2", "On the clock", root);
    const line = element("div", "", root);
    line.className = "clock";
    for (const [launched, began, ended, step, pieces] of seen.starts) {
      const waits = element("div", "", line);
      waits.className = "waits";
      waits.title = `starting, from step ${step.toLocaleString("en")}`;
      at(waits, launched, began);
      const life = element("div", "", line);
      life.className = "life";
      at(life, began, ended);
      for (const [from, to, shares] of pieces) {
        const piece = element("div", "", line);
        piece.className = "piece";
        at(piece, from, to);
        let below = 0;
        const stops = shares.map((share, index) => {
          const color = seen.phases[index][1], text = `${color} ${(100 * below).toFixed(1)}% ${(100 * (below + share)).toFixed(1)}%`;
          below += share;
          return text;
        });
        piece.style.background = `linear-gradient(to top, ${stops.join(", ")})`;
        piece.title = shares.map((share, index) => [seen.phases[index][0], share]).filter(([, share]) => share > 0.005)
          .map(([name, share]) => `${name} ${(100 * share).toFixed(0)} %`).join(", ");
      }
    }
    const told = element("p", "", root);
    told.className = "told";
    told.setAttribute("aria-live", "polite");
    const marks = seen.marks.map(([place, kind, when, words]) => {
      const mark = element("button", kind === "fault" ? "✕" : kind === "recovery" ? "↻" : "■", line);
      mark.className = `mark ${kind}`;
      mark.style.left = `${100 * place}%`;
      mark.title = `${when}: ${words}`;
      mark.setAttribute("aria-label", mark.title);
      const show = () => { told.textContent = mark.title; };
      for (const name of ["focus", "mouseenter", "click"]) mark.addEventListener(name, show);
      return mark;
    });
    const count = (kind) => seen.marks.filter((mark) => mark[1] === kind).length;
    told.textContent = marks.length ? `faults: ${count("fault")}, recoveries: ${count("recovery")}; point at a mark, or reach it by Tab` : "";
    const legend = element("p", "", root);
    legend.className = "legend";
    for (const [name, color, share] of seen.phases) {
      if (share < 0.0005) continue;
      const item = element("span", "", legend);
      element("i", "", item).style.background = color;
      item.append(`${name} ${(100 * share).toFixed(1)} %`);
    }
    const item = element("span", "", legend);
    element("i", "", item).className = "waits";
    item.append("starting");
    element("span", `from ${seen.began} for ${span(seen.seconds)}`, legend);
  };
  const span = (seconds) => {
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${whole % 60} s` : `${Number(seconds.toPrecision(3))} s`;
  };

  // Experts on a circle and concepts around them. Pointing at one, or going there by arrow keys, shows what it is tied to.
  const shape = (name, parent, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
    parent.appendChild(made);
    return made;
  };
  const tint = (relation) => relation === "parent" ? "var(--ink)" : figures.ties[relation][0];  // ink is light in the dark
  const drawKnowledge = () => {
    const graphs = figures.knowledge || [];
    if (!graphs.length) return;
    const root = part("knowledge");
    element("h2", "Experts, and what they know", root);
    const chosen = Math.min(state.graph ?? graphs.length - 1, graphs.length - 1);
    if (graphs.length > 1) {
      const label = control("Step", root), slider = element("input", "", label), told = element("output", "", label);
      Object.assign(slider, { type: "range", min: 0, max: graphs.length - 1, step: 1, value: chosen });
      told.textContent = graphs[chosen].step.toLocaleString("en");
      slider.addEventListener("input", () => {
        state.graph = Number(slider.value);
        told.textContent = graphs[state.graph].step.toLocaleString("en");
        drawGraph(graphs[state.graph], box, info);
      });
      label.className = "slider";
    }
    const both = element("div", "", root);
    both.className = "graph";
    const box = element("div", "", both), info = element("div", "", both);
    info.className = "info";
    info.setAttribute("aria-live", "polite");
    drawGraph(graphs[chosen], box, info);
    const legend = element("p", "", root);
    legend.className = "legend";
    for (const relation of new Set(graphs.flatMap((graph) => graph.ties.map((tie) => tie[2])))) {
      const item = element("span", "", legend);
      element("i", "", item).style.background = tint(relation);
      item.append(figures.ties[relation][1]);
    }
    element("span", "larger: more tokens in all; darker: fewer concepts", legend);
  };
  const drawGraph = (graph, box, info) => {
    box.replaceChildren();
    const isExpertNode = (node) => node.radius !== undefined, numExperts = graph.nodes.filter(isExpertNode).length;
    const many = graph.nodes.length - numExperts > 24;  // their names lie along the radius then
    const thin = Math.max(0.3, Math.min(1, 16 / numExperts));
    const drawing = shape("svg", box, { viewBox: many ? "-1.6 -1.5 3.2 3" : "-1.28 -1.16 2.56 2.32", tabindex: 0, role: "application",
      "aria-label": `Experts at step ${graph.step}: arrow keys go from one to the next` });
    const lines = graph.ties.map(([one, other, relation, weight]) => {
      const a = graph.nodes[one], b = graph.nodes[other], bend = { "co-activation": 0.2, similarity: -0.2, split: 0.38 }[relation] || 0;
      const middle = [(a.x + b.x) / 2 - bend * (b.y - a.y), (a.y + b.y) / 2 + bend * (b.x - a.x)];
      const line = shape("path", drawing, { d: `M${a.x},${a.y}Q${middle[0].toFixed(4)},${middle[1].toFixed(4)} ${b.x},${b.y}`, fill: "none",
        "stroke-width": (relation === "parent" ? 0.01 * thin : (0.006 + 0.024 * weight) * thin).toFixed(4), "stroke-linecap": "round", class: "tie",
        ...(relation === "split" ? { "stroke-dasharray": "0.02 0.02" } : {}) });
      line.style.stroke = tint(relation);
      return line;
    });
    let now = -1;
    const show = (index) => {
      now = index;
      const near = new Set(index < 0 ? [] : [index]);
      graph.ties.forEach(([one, other], number) => {
        const isOwn = one === index || other === index;
        if (isOwn) near.add(one).add(other);
        lines[number].classList.toggle("faint", index >= 0 && !isOwn);
      });
      shapes.forEach((each, number) => {
        each.classList.toggle("faint", index >= 0 && !near.has(number));
        each.classList.toggle("now", number === index);
      });
      info.replaceChildren();
      const node = graph.nodes[index];
      element("b", node ? `${isExpertNode(node) ? "expert" : "concept"} ${node.name}` : graph.layer, info);
      const words = node ? node.told : [`step ${graph.step.toLocaleString("en")}`, `${numExperts} experts`,
        "point at an expert or a concept, or use the arrow keys"];
      words.forEach((text) => element("span", text, info));
    };
    const shapes = graph.nodes.map((node, index) => {
      const isExpert = isExpertNode(node), group = shape("g", drawing, { class: isExpert ? "expert" : "concept" });
      const dot = shape("circle", group, { cx: node.x, cy: node.y, r: isExpert ? node.radius : 0.026 });
      if (isExpert) {
        dot.style.fill = node.dormant ? "var(--line)" : `color-mix(in srgb, #163f73 ${(20 + 80 * node.specialization).toFixed(0)}%, #cfe0f2)`;
        if (node.dormant) dot.style.stroke = "#b5485d";
      }
      const away = Math.hypot(node.x, node.y) || 1, out = isExpert ? 0 : 0.055;
      const place = { x: node.x * (1 + out / away), y: node.y * (1 + out / away) };
      const east = node.x / away, text = shape("text", group, { ...place, "text-anchor": isExpert || (Math.abs(east) < 0.2 && !many) ? "middle" : east > 0 ? "start" : "end",
        "dominant-baseline": "central", "font-size": isExpert ? Math.min(0.1, 0.9 * node.radius).toFixed(3) : many ? 0.045 : 0.062 });
      if (many && !isExpert) text.setAttribute("transform", `rotate(${(Math.atan2(node.y, node.x) * 180 / Math.PI + (east < 0 ? 180 : 0)).toFixed(1)} ${place.x} ${place.y})`);
      if (isExpert && !node.dormant && node.specialization > 0.35) text.style.fill = "#fff";
      text.textContent = node.name.length > 18 ? node.name.slice(0, 17) + "…" : node.name;
      shape("title", group, {}).textContent = [node.name, ...node.told].join("\n");
      group.addEventListener("mouseenter", () => show(index));
      group.addEventListener("click", () => show(index));
      return group;
    });
    drawing.addEventListener("mouseleave", () => show(-1));
    drawing.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key], number = graph.nodes.length;
      if (event.key === "Escape") show(-1);
      if (event.key === "Home" || event.key === "End") show(event.key === "Home" ? 0 : number - 1);
      if (move === undefined) return;
      event.preventDefault();
      show(now < 0 ? (move > 0 ? 0 : number - 1) : (now + move + number) % number);
    });
    show(-1);
  };

  // Charts by their order on the page; those that a run has only later are added below the others.
  const parts = () => [...figures.charts.map((chart) => ["charts", chart]), ...figures.telemetry.map((chart) => ["telemetry", chart]),
    ...(figures.experts ? [["experts", figures.experts]] : [])];
  const places = {};
  const placeOf = (kind, isFirst) => {
    if (isFirst) return element("div", "", root);
    if (kind === "experts") return document.getElementById("drawn");
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
    drawTimeline();
    drawKnowledge();
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
        document.getElementById("about").textContent = figures.about;
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
