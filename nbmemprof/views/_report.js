// Timelines of the HTML report: canvas, wheel, drag and keys; no library, no request.
"use strict";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const trim = (v, d) => String(+v.toFixed(d));
function bytes(size, digits = 2) {
  let unit = 0;
  while (unit < 5 && +size.toFixed(digits) >= 1024) { size /= 1024; unit++; }
  return `${trim(size, unit ? digits : 0)} ${UNITS[unit]}`;
}
const clock = us => us < 1e3 ? `${trim(us, 2)} µs` : us < 1e6 ? `${trim(us / 1e3, 2)} ms` : `${trim(us / 1e6, 3)} s`;
function step(span, count) {
  const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find(k => k * power >= raw * 0.8) * power;
}
const sums = list => { let at = 0; return list.map(v => at += v); };
function upTo(xs, x) {  // index of the last point at or before x
  let low = 0, high = xs.length;
  while (low < high) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid + 1; else high = mid; }
  return low - 1;
}

function timeline(host, data) {
  const xs = sums(data.x).map(v => v / 10), series = data.series.map(s => sums(s.v));
  const rv = sums(data.rv);
  const total = xs.map((_, i) => series.reduce((t, s) => t + s[i], 0));
  const first = xs[0], end = xs.at(-1), last = end + Math.max(end - first, 1e-3) * 0.01, timed = data.axis === "time";
  const say = x => timed ? clock(x) : `event ${Math.round(x)}`;
  const canvas = document.createElement("canvas"), tip = document.createElement("div"), note = document.createElement("p");
  canvas.tabIndex = 0; canvas.setAttribute("role", "img"); canvas.setAttribute("aria-label", data.label);
  tip.className = "tip"; tip.hidden = true; note.className = "note"; note.setAttribute("aria-live", "polite");
  host.replaceChildren(canvas, tip, note);
  const pad = {l: 70, r: 14, t: 24, b: 38};
  let from = first, to = last, hover = null, frame = 0;
  const width = () => canvas.clientWidth, height = () => canvas.clientHeight;
  const px = x => pad.l + (x - from) / (to - from) * (width() - pad.l - pad.r);
  const at = p => from + (p - pad.l) / (width() - pad.l - pad.r) * (to - from);

  function draw() {
    frame = 0;
    const ratio = devicePixelRatio || 1, w = width(), h = height(), css = getComputedStyle(host);
    const ink = css.getPropertyValue("--ink"), muted = css.getPropertyValue("--muted"), grid = css.getPropertyValue("--grid"), alert = css.getPropertyValue("--alert");
    canvas.width = w * ratio; canvas.height = h * ratio;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio); g.font = "11px system-ui, sans-serif";
    const a = Math.max(0, upTo(xs, from)), b = Math.min(xs.length - 1, upTo(xs, to) + 1);
    let top = 1;
    for (let i = a; i <= b; i++) top = Math.max(top, total[i], rv[i] ?? 0);
    for (const bound of data.bounds) if (bound.size < top * 1.7) top = Math.max(top, bound.size);
    top *= 1.08;
    const py = v => h - pad.b - v / top * (h - pad.t - pad.b);
    const dy = 2 ** Math.max(0, Math.round(Math.log2(top / 5)));  // prints round in every binary unit
    g.textAlign = "right";
    for (let v = 0; v <= top; v += dy) { g.fillStyle = grid; g.fillRect(pad.l, py(v), w - pad.l - pad.r, 1); g.fillStyle = muted; g.fillText(bytes(v), pad.l - 6, py(v) + 4); }
    g.save(); g.beginPath(); g.rect(pad.l, pad.t - 20, w - pad.l - pad.r, h); g.clip();
    // Boxes, one a step or, where steps are narrower than a pixel, one a pixel with the highest of its moments. (A filled path of
    // thousands of steps takes seconds without a GPU.)
    const cells = [];
    for (let i = a; i <= b; i++) {
      const x0 = Math.round(px(xs[i]) * ratio) / ratio, x1 = Math.round(px(i < xs.length - 1 ? xs[i + 1] : last) * ratio) / ratio, cell = cells.at(-1);
      if (cell && x0 <= cell.x0) { if (total[i] > total[cell.i]) cell.i = i; cell.x1 = Math.max(cell.x1, x1); }
      else { if (cell) cell.x1 = x0; cells.push({x0, x1: Math.max(x1, x0 + 1 / ratio), i}); }
    }
    const foot = cells.map(() => 0);
    series.forEach((values, k) => {
      g.fillStyle = data.series[k].colour;
      cells.forEach((cell, c) => { const v = values[cell.i]; if (v) { const y = py(foot[c] + v); g.fillRect(cell.x0, y, cell.x1 - cell.x0, py(foot[c]) - y); foot[c] += v; } });
    });
    if (rv.length) {
      g.strokeStyle = ink; g.lineWidth = 1.4; g.beginPath();
      for (const cell of cells) { g.lineTo(cell.x0, py(rv[cell.i])); g.lineTo(cell.x1, py(rv[cell.i])); }
      g.stroke();
    }
    g.textAlign = "left";
    for (const bound of data.bounds) if (bound.size < top) { g.fillStyle = alert; g.fillRect(pad.l, py(bound.size), w, 1.2); g.fillText(`${bound.name} ${bytes(bound.size)}`, pad.l + 4, py(bound.size) - 4); }
    let free = -1e9;
    for (const mark of data.marks) {
      const x = px(mark.x), end = mark.end === null ? x : px(mark.end);
      if (end < pad.l || x > w) continue;
      g.fillStyle = mark.kind === "oom" ? alert : muted;
      if (mark.end === null) g.fillRect(x, pad.t - 4, 1, h - pad.t - pad.b + 4); else { g.fillRect(x, pad.t - 5, Math.max(1, end - x - 1), 3); }
      const start = Math.max(x, pad.l) + 2, wide = g.measureText(mark.name).width;
      if (start > free && (mark.end === null || end - start > wide)) { g.fillText(mark.name, start, pad.t - 8); free = start + wide + 6; }
    }
    g.strokeStyle = ink; g.setLineDash([2, 3]); g.beginPath(); g.moveTo(px(data.peak.x), py(data.peak.size)); g.lineTo(px(data.peak.x), py(0)); g.stroke(); g.setLineDash([]);
    g.fillStyle = ink; g.beginPath(); g.arc(px(data.peak.x), py(data.peak.size), 4, 0, 7); g.fill();
    const words = data.peak.words, left = px(data.peak.x) + g.measureText(words).width + 12 > w;
    g.font = "600 12px system-ui, sans-serif"; g.textAlign = left ? "right" : "left"; g.fillText(words, px(data.peak.x) + (left ? -8 : 8), py(data.peak.size) - 4);
    if (hover !== null) { g.fillStyle = ink; g.fillRect(px(hover), pad.t, 1, h - pad.t - pad.b); }
    g.restore();
    g.font = "11px system-ui, sans-serif"; g.textAlign = "center"; g.fillStyle = muted;
    const [name, factor] = !timed ? ["event", 1] : to >= 2e6 ? ["s", 1e6] : to >= 2e3 ? ["ms", 1e3] : ["µs", 1];
    const dx = step((to - from) / factor, Math.max(2, w / 110));
    for (let v = Math.ceil(from / factor / dx) * dx; v <= to / factor; v += dx) { g.fillRect(px(v * factor), h - pad.b, 1, 4); g.fillText(+v.toPrecision(10), px(v * factor), h - pad.b + 16); }
    g.fillText(timed ? `time since the capture's start (${name})` : "events, in order", (w + pad.l) / 2, h - 5);
    host.dataset.from = from; host.dataset.to = to;
  }
  const again = () => { frame ||= requestAnimationFrame(draw); };
  function look(a, b) {
    const span = Math.min(Math.max(b - a, (last - first) * 1e-6), last - first);
    from = Math.min(Math.max(a, first), last - span); to = from + span;
    note.textContent = `${say(from)} to ${say(to)}. Wheel or + and − zoom, drag or arrows move, 0 shows all.`;
    again();
  }
  const zoom = (factor, middle) => look(middle - (middle - from) * factor, middle + (to - middle) * factor);
  function show(x, where) {
    hover = x; again();
    if (x === null) { tip.hidden = true; return; }
    const i = Math.max(0, upTo(xs, x));
    const rows = data.series.map((s, k) => [s.name, series[k][i]]).filter(r => r[1]).reverse();
    tip.replaceChildren(...[[say(xs[i]), ""], ["allocated", total[i]], ...(rv.length ? [["reserved", rv[i]]] : []), ...rows].map(([n, v], k) => {
      const line = document.createElement("div"); line.textContent = v === "" ? n : `${n}: ${bytes(v)}`; if (!k) line.className = "when"; return line; }));
    tip.hidden = false;
    tip.style.left = `${Math.min(Math.max(where + 14, 0), width() - tip.offsetWidth - 4)}px`;
  }
  canvas.addEventListener("wheel", e => { e.preventDefault(); zoom(Math.exp(Math.max(-1, Math.min(1, e.deltaY / 240))), at(e.offsetX)); }, {passive: false});
  let grip = null;
  canvas.addEventListener("pointerdown", e => { grip = {x: e.offsetX, from, to}; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointerup", () => { grip = null; });
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("pointermove", e => {
    if (grip) { const moved = (grip.x - e.offsetX) / (width() - pad.l - pad.r) * (grip.to - grip.from); look(grip.from + moved, grip.to + moved); }
    show(Math.min(Math.max(at(e.offsetX), first), last), e.offsetX);
  });
  canvas.addEventListener("dblclick", () => look(first, last));
  canvas.addEventListener("keydown", e => {
    const span = to - from, moves = {ArrowLeft: -0.2, ArrowRight: 0.2}, zooms = {"+": 0.5, "=": 0.5, ArrowUp: 0.5, "-": 2, ArrowDown: 2};
    if (e.key in moves) look(from + moves[e.key] * span, to + moves[e.key] * span);
    else if (e.key in zooms) zoom(zooms[e.key], (from + to) / 2);
    else if (e.key === "0" || e.key === "Home") look(first, last);
    else return;
    e.preventDefault();
  });
  new ResizeObserver(again).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  look(first, last);
}
for (const host of document.querySelectorAll(".timeline")) timeline(host, JSON.parse(document.getElementById(host.dataset.source).textContent));
