// Charts of a run: islands fed by one JSON request and by the page's live stream (event "points").
// A series is a map step -> [value, kind]; kind names a value that is not finite. Nothing is drawn as 0 that was not 0.
(() => {
  "use strict";

  const root = document.querySelector("[data-charts]");
  if (!root) return;
  const charts = [];
  const series = new Map();
  const about = { hidden: {}, marks: [], attempt: null };
  const view = {
    smoothing: Number(localStorage.getItem("cohort-smoothing") ?? 0.6),
    log: localStorage.getItem("cohort-scale") === "log",
  };

  // ------------------------------------------------------------------ numbers and colours
  // Three digits as in app/formatting.py; ticks drop trailing zeros.
  function text(value, loose = false) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    let out;
    if (size === 0) out = "0";
    else if (size < 9.995e-4) out = value.toExponential(1).replace(".0e", "e");
    else if (size >= 1e5 && loose) out = value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
    else {
      const digits = size < 0.9995 ? 3 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
      const whole = size >= 1000 || (Number.isInteger(value) && loose);
      out = value.toLocaleString("en", { minimumFractionDigits: loose || whole ? 0 : digits, maximumFractionDigits: digits });
    }
    return out.replaceAll("-", "−");
  }

  function bytes(value) {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
    return `${text(value / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  }

  // Short times in milliseconds, as in app/formatting.py.
  const isShort = (chart, value) => chart.format === "seconds" && value !== 0 && Math.abs(value) < 0.095;

  function scaled(chart, value) {
    if (value === null || value === undefined) return "–";
    if (isShort(chart, value)) return `${text(1000 * value)} ms`;
    if (chart.format === "percent") return `${(100 * value).toFixed(Math.abs(value) >= 0.0995 ? 0 : 1).replace("-", "−")} %`;
    if (chart.format === "bytes") return bytes(value);
    return text(value) + (chart.unit ? ` ${chart.unit}` : "");
  }

  function tick(chart, value) {
    if (value === null) return "";
    if (chart.format === "bytes") return bytes(value);
    if (chart.format === "percent") return `${text(100 * value, true)} %`;
    return isShort(chart, value) ? `${text(1000 * value, true)} ms` : text(value, true);
  }

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  function colour(name, alpha = 1) {
    probe.style.setProperty("color", `var(${name})`);
    const rgb = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3);
    return `rgba(${rgb.join(",")},${alpha})`;
  }

  const lineColour = (index) => (index === 0 ? "--accent" : `--part-${1 + ((index - 1) % 5)}`);

  // ------------------------------------------------------------------ data
  function smooth(values, weight) {
    let state = null;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      state = state === null ? value : weight * state + (1 - weight) * value;
      return state;
    });
  }

  function withGaps(steps) {
    // A hole wider than the usual stride breaks the line; downsampled series have no stride.
    const strides = steps.slice(1).map((step, i) => step - steps[i]).sort((a, b) => a - b);
    const usual = strides[Math.floor(strides.length / 2)] || 1;
    const holes = [];
    steps.forEach((step, i) => { if (i && step - steps[i - 1] > 1.5 * usual) holes.push((step + steps[i - 1]) / 2); });
    return holes;
  }

  function table(chart) {
    const names = chart.names.filter((name) => series.get(name)?.size);
    const steps = new Set();
    for (const name of names) {
      const own = [...series.get(name).keys()].sort((a, b) => a - b);
      own.forEach((step) => steps.add(step));
      if (!about.hidden[name]) withGaps(own).forEach((hole) => { if (names.length === 1) steps.add(hole); });
    }
    const xs = [...steps].sort((a, b) => a - b);
    const columns = [];
    chart.notPositive = 0;
    for (const name of names) {
      const points = series.get(name);
      const raw = xs.map((x) => {
        const point = points.get(x);
        if (point === undefined) return names.length === 1 ? null : undefined;
        if (view.log && point[0] !== null && point[0] <= 0) { chart.notPositive += 1; return null; }
        return point[0];
      });
      columns.push(raw, smooth(raw, chart.smoothed ? view.smoothing : 0));
    }
    return { names, data: [xs, ...columns] };
  }

  // ------------------------------------------------------------------ drawing
  function drawMarks(chart) {
    return (u) => {
      const context = u.ctx;
      const ratio = devicePixelRatio;
      context.save();
      context.font = `${11 * ratio}px system-ui, sans-serif`;
      for (const mark of about.marks) {
        const x = u.valToPos(mark.x, "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        context.strokeStyle = context.fillStyle = colour("--dim", 0.8);
        context.setLineDash([3 * ratio, 3 * ratio]);
        context.beginPath();
        context.moveTo(x, u.bbox.top);
        context.lineTo(x, u.bbox.top + u.bbox.height);
        context.stroke();
        context.textAlign = "left";
        context.textBaseline = "alphabetic";
        context.fillText(mark.label, x + 4 * ratio, u.bbox.top + u.bbox.height - 5 * ratio);
      }
      context.setLineDash([]);
      context.fillStyle = colour("--bad");
      context.textAlign = "center";
      for (const [step, kind] of chart.nonFinite) {
        const x = u.valToPos(step, "x", true);
        context.fillText(kind === "nan" ? "NaN" : kind === "+inf" ? "Inf" : "−Inf", x, u.bbox.top + 22 * ratio);
        context.fillRect(x - ratio / 2, u.bbox.top + 26 * ratio, ratio, u.bbox.height - 26 * ratio);
      }
      context.restore();
    };
  }

  // A constant series stands in the middle of a narrow range, not at the foot of 0 to 100.
  function valueRange(chart) {
    return (u, low, high) => {
      if (low === null) return [0, 1];
      if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
      const reach = Math.abs(low) * 0.1 || (chart.format === "percent" ? 0.01 : 1);
      return low === 0 ? [0, reach] : [low - reach, high + reach];
    };
  }

  function options(chart, names) {
    const axis = { stroke: () => colour("--dim"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => colour("--line"), width: 1 } };
    const lines = names.flatMap((name, index) => [
      { label: `${name} raw`, stroke: () => colour(lineColour(index), 0.3), width: 1.3, points: { show: chart.sparse, size: 5 }, spanGaps: names.length > 1 },
      { label: name, stroke: () => colour(lineColour(index)), width: 2, points: { show: false }, spanGaps: names.length > 1 },
    ]);
    return {
      width: chart.plot.clientWidth || 400,
      height: chart.plot.clientHeight || 150,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { sync: { key: "run" }, drag: { x: true, y: false, dist: 6 }, points: { size: 6 }, y: false },
      scales: { x: { time: false }, y: view.log ? { distr: 3 } : { range: valueRange(chart) } },
      axes: [
        { ...axis, size: 22, gap: 3, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 2500, 5000, 10000, 50000], grid: { show: false } },
        { ...axis, size: 46, gap: 5, space: 28, values: (_, ticks) => ticks.map((v) => tick(chart, v)) },
      ],
      series: [{}, ...lines],
      hooks: { draw: [drawMarks(chart)], setCursor: [() => showValue(chart)] },
    };
  }

  function build(chart) {
    chart.uplot?.destroy();
    const { names, data } = table(chart);
    chart.shown = names;
    chart.sparse = data[0].length < 12;
    findNonFinite(chart);
    chart.figure.hidden = Boolean(chart.figure.dataset.optional) && !names.length;
    if (!names.length) { chart.uplot = null; annotate(chart); return; }
    chart.uplot = new uPlot(options(chart, names), data, chart.plot);
    chart.uplot.over.addEventListener("mousedown", (event) => { chart.pressedAt = event.clientX; });
    chart.uplot.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - chart.pressedAt) < 4) open(chart); });
    annotate(chart);
  }

  function update(chart) {
    const { names, data } = table(chart);
    const sparse = data[0].length < 12;
    if (!chart.uplot || names.length !== chart.shown.length || sparse !== chart.sparse) { build(chart); return; }
    findNonFinite(chart);
    const x = chart.uplot.scales.x;
    const old = chart.uplot.data[0];
    const zoomed = old.length > 1 && (x.min > old[0] || x.max < old[old.length - 1]);
    chart.uplot.setData(data, !zoomed);
    annotate(chart);
  }

  function findNonFinite(chart) {
    chart.nonFinite = chart.names.flatMap((name) => [...(series.get(name) ?? [])].filter(([, point]) => point[1]).map(([step, point]) => [step, point[1]]));
  }

  // ------------------------------------------------------------------ words around the plot
  function annotate(chart) {
    const notes = [];
    const hidden = Math.max(0, ...chart.names.map((name) => about.hidden[name] ?? 0));
    if (hidden) notes.push(`${hidden.toLocaleString("en")} points hidden: drawn by first, last, lowest and highest of each bucket`);
    if (chart.nonFinite?.length) notes.push(`${chart.nonFinite.length} not finite, first at step ${Math.min(...chart.nonFinite.map(([step]) => step))}`);
    if (chart.notPositive) notes.push(`${chart.notPositive} at or below 0, not on a log scale`);
    if (!chart.uplot) notes.push("no values yet");
    chart.note.textContent = notes.join(" · ");
    showValue(chart);
  }

  function showValue(chart) {
    const index = chart.uplot?.cursor.idx;
    const at = index ?? null;
    const values = (chart.shown ?? []).map((name) => {
      const points = series.get(name);
      const step = at === null ? Math.max(...points.keys()) : chart.uplot.data[0][at];
      const point = points.get(step);
      return point ? (point[1] ? point[1] : scaled(chart, point[0])) : "–";
    });
    const prefix = at === null || !chart.uplot ? "" : `step ${text(chart.uplot.data[0][at], true)} · `;
    chart.latest.textContent = values.length ? prefix + values[0] : "";
    chart.legend?.querySelectorAll("[data-name]").forEach((entry) => {
      const place = chart.shown.indexOf(entry.dataset.name);
      entry.hidden = place < 0;
      entry.querySelector("b").textContent = values[place] ?? "";
      entry.querySelector(".key").className = `key p${place < 0 ? 5 : place === 0 ? 0 : 1 + ((place - 1) % 5)}`;
    });
  }

  // ------------------------------------------------------------------ reading a point's rollouts
  function open(chart) {
    const index = chart.uplot?.cursor.idx;
    if (index === null || index === undefined || !root.dataset.stepUrl) return;
    const step = Math.round(chart.uplot.data[0][index]);
    if (step > 0) window.location.assign(root.dataset.stepUrl.replace("STEP", step));
  }

  function onKey(chart, event) {
    const u = chart.uplot;
    if (!u) return;
    if (event.key === "Enter") { open(chart); return; }
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const last = u.data[0].length - 1;
    const index = Math.min(last, Math.max(0, (u.cursor.idx ?? last) + (event.key === "ArrowRight" ? 1 : -1)));
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: 20 });
  }

  // ------------------------------------------------------------------ feeding
  function take(message) {
    for (const [name, points] of Object.entries(message.series)) {
      if (!series.has(name)) series.set(name, new Map());
      const known = series.get(name);
      for (const [step, value, kind] of points) known.set(step, [value, kind]);
    }
  }

  async function load() {
    const response = await fetch(root.dataset.seriesUrl, { headers: { Accept: "application/json" } });
    if (!response.ok) return;
    const message = await response.json();
    series.clear();
    take(message);
    about.hidden = message.hidden;
    about.marks = message.marks;
    about.attempt = message.attempt;
    const words = document.querySelector("[data-marks]");
    if (words) words.textContent = about.marks.map((mark) => mark.note).filter(Boolean).join(" · ");
    charts.forEach(build);
    root.dataset.ready = "yes";
  }

  let pending = false;
  function redrawSoon() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; charts.forEach(update); });
  }

  document.addEventListener("points", (event) => {
    const message = JSON.parse(event.detail.data);
    if (message.stage !== root.dataset.stage) return;
    if (about.attempt !== null && message.attempt !== about.attempt) { load(); return; }
    take(message);
    redrawSoon();
  });

  // ------------------------------------------------------------------ controls
  const slider = document.getElementById("smoothing");
  function showControls() {
    if (slider) { slider.value = view.smoothing; slider.nextElementSibling.textContent = Number(view.smoothing).toFixed(2); }
    document.querySelectorAll("[data-scale]").forEach((button) => button.setAttribute("aria-pressed", String((button.dataset.scale === "log") === view.log)));
  }
  slider?.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    localStorage.setItem("cohort-smoothing", slider.value);
    showControls();
    redrawSoon();
  });
  document.querySelectorAll("[data-scale]").forEach((button) => button.addEventListener("click", () => {
    view.log = button.dataset.scale === "log";
    localStorage.setItem("cohort-scale", button.dataset.scale);
    showControls();
    charts.forEach(build);
  }));
  const rebuild = () => charts.forEach((chart) => chart.uplot?.redraw());
  document.addEventListener("cohort:theme", rebuild);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);

  for (const figure of root.querySelectorAll("figure[data-names]")) {
    const chart = {
      figure, names: JSON.parse(figure.dataset.names), unit: figure.dataset.unit || "", format: figure.dataset.format || "", smoothed: figure.dataset.smooth !== "no",
      plot: figure.querySelector(".plot"), latest: figure.querySelector("[data-latest]"), note: figure.querySelector(".note"),
      legend: figure.querySelector(".legend"), uplot: null, shown: [], nonFinite: [], pressedAt: 0,
    };
    chart.plot.addEventListener("keydown", (event) => onKey(chart, event));
    new ResizeObserver(() => chart.uplot?.setSize({ width: chart.plot.clientWidth, height: chart.plot.clientHeight })).observe(chart.plot);
    charts.push(chart);
  }
  document.querySelectorAll(".ctl[hidden]").forEach((controls) => { controls.hidden = false; });
  showControls();
  load();
})();
