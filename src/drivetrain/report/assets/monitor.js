(() => {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
  paint();
  dark.addEventListener("change", paint);
  if (!document.getElementById("runs")) return; // a page that says why there is none

  // Everything that a run wrote becomes text, never HTML.
  const element = (name, text, parent, kind) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (kind) made.className = kind;
    if (parent) parent.appendChild(made);
    return made;
  };
  const isNumber = (value) => typeof value === "number" && isFinite(value);
  const short = (value) => Math.abs(value) >= 1e7 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3)
    : Math.abs(value) >= 1e3 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  const span = (seconds) => {
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
  };
  // Okabe and Ito's colors; the word stands beside them, so that nobody has to tell them apart.
  const COLORS = { running: "#009e73", finished: "#0072b2", stopped: "#b98d3c", refused: "#b98d3c", crashed: "#d55e00" };

  const curve = (points, parent, name) => {
    const known = points.filter(([step, loss]) => isNumber(step) && isNumber(loss));
    if (known.length < 2) return;
    const space = "http://www.w3.org/2000/svg";
    const drawing = document.createElementNS(space, "svg"), line = document.createElementNS(space, "polyline");
    const steps = known.map((point) => point[0]), losses = known.map((point) => point[1]);
    const low = Math.min(...losses), high = Math.max(...losses), first = steps[0], last = steps[steps.length - 1];
    const place = ([step, loss]) => [188 * (step - first) / (last - first || 1) + 1, 42 - 40 * (loss - low) / (high - low || 1)];
    line.setAttribute("points", known.map((point) => place(point).map((value) => value.toFixed(1)).join(",")).join(" "));
    line.setAttribute("fill", "none");
    line.setAttribute("stroke", "currentColor");
    line.setAttribute("stroke-width", "1.5");
    drawing.setAttribute("viewBox", "0 0 190 44");
    drawing.setAttribute("role", "img");
    drawing.setAttribute("aria-label", `loss of ${name} from step ${first} to ${last}: ${short(losses[0])} to ${short(losses[losses.length - 1])}`);
    drawing.appendChild(line);
    parent.appendChild(drawing);
  };

  const device = (row) => [
    isNumber(row.utilisation_percent) ? `${row.utilisation_percent.toFixed(0)} % busy` : "",
    isNumber(row.memory_used_gib) ? `${row.memory_used_gib.toFixed(1)}${isNumber(row.memory_total_gib) ? " of " + row.memory_total_gib.toFixed(1) : ""} GiB` : "",
    isNumber(row.temperature_c) ? `${row.temperature_c} °C` : "",
    isNumber(row.power_watts) ? `${row.power_watts.toFixed(0)} W` : "",
    Array.isArray(row.throttled) && row.throttled.length ? `throttled: ${row.throttled.join(", ")}` : "",
  ].filter(Boolean);

  const fact = (label, value, parent) => {
    const box = element("span", "", parent);
    box.append(`${label} `);
    element("b", value, box);
  };

  const block = (run) => {
    const box = element("section", "", null, "run");
    const head = element("h2", "", box);
    const link = element("a", run.title, head);
    link.href = `/run/${encodeURIComponent(run.id)}`;
    const state = element("span", run.state, head, "state");
    state.style.color = COLORS[run.state] || "#8c8c8c";
    if (run.num_steps && run.state === "running") {
      const bar = element("progress", "", box);
      bar.max = run.num_steps;
      bar.value = Math.min(run.step, run.num_steps);
      bar.setAttribute("aria-label", "steps done");
    }
    const row = element("div", "", box, "row");
    fact("step", run.step.toLocaleString("en") + (run.num_steps ? ` of ${run.num_steps.toLocaleString("en")}` : ""), row);
    if (isNumber(run.epoch)) fact("epoch", String(run.epoch + 1), row);
    if (isNumber(run.loss)) fact("loss", short(run.loss), row);
    if (run.has_diverged) fact("loss", "not finite", row);
    for (const [name, value] of Object.entries(run.metrics)) {
      if (name !== "valid_loss" && isNumber(value)) fact(name.replace(/^valid_/, "").replaceAll("_", " "), short(value), row);
    }
    if (isNumber(run.samples_per_second)) fact("samples/s", short(run.samples_per_second), row);
    if (isNumber(run.seconds_left)) fact("time left", span(Math.max(1, run.seconds_left)), row);
    if (isNumber(run.goodput)) fact("goodput", `${(100 * run.goodput).toFixed(0)} %`, row);
    fact("checkpoint", run.checkpoint === null ? "none" : `step ${run.checkpoint.toLocaleString("en")}`, row);
    curve(run.losses, row, run.title);
    for (const words of [run.cause, run.failures && `interruptions ${run.failures}`,
      isNumber(run.idle_seconds) ? `no step was recorded for ${span(run.idle_seconds)}` : ""]) {
      if (words) element("p", words, box, "cause");
    }
    for (const one of run.devices) element("p", [one.device, ...device(one)].join("  ·  "), box);
    element("p", run.folder, box);
    return box;
  };

  let seconds = 2;
  const renew = async () => {
    const root = document.documentElement;
    try {
      const answer = await fetch("/data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const seen = await answer.json();
      seconds = seen.every;
      const goingOn = seen.runs.filter((run) => run.state === "running").length;
      document.getElementById("about").textContent =
        `${goingOn} going on, ${seen.runs.length} shown; ${seen.output_dir}, at ${seen.time.slice(11, 19)} UTC${seen.note ? "; " + seen.note : ""}`;
      document.getElementById("devices").replaceChildren(...seen.devices.map((one) => {
        const card = element("div", "", null, "card");
        element("b", [one.device, one.name].filter(Boolean).join(" · "), card);
        device(one).forEach((words) => element("span", words, card));
        return card;
      }));
      // Where the keyboard is stays where it is: links keep their place by the run they lead to.
      const focused = document.activeElement && document.activeElement.getAttribute("href");
      document.getElementById("runs").replaceChildren(...seen.runs.map(block));
      if (!seen.runs.length) element("p", "No runs yet: `drivetrain train digits` makes one.", document.getElementById("runs"));
      if (focused) [...document.links].find((link) => link.getAttribute("href") === focused)?.focus();
      root.dataset.lost = "";
      root.dataset.renewed = String(Number(root.dataset.renewed || 0) + 1);
    } catch (error) {
      root.dataset.lost = "yes";
    }
    setTimeout(renew, 1000 * seconds);
  };
  renew();
})();
