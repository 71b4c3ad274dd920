"use strict";
// Curves as SVG. Text goes in through textContent alone; what the page knows stands in the payload.
const payload = JSON.parse(document.getElementById("payload").textContent);

function element(tag, attributes, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function shownNumber(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= rough);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(Number((place * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  const every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 5));
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += every) found.push(10 ** power);
  return found.length > 1 ? found : [low, high];
}

function smoothed(points, width) {
  if (width < 2) return points;
  return points.map((point, place) => {
    const part = points.slice(Math.max(0, place - width + 1), place + 1).map((one) => one[1]).filter((value) => value !== null);
    return [point[0], part.length && point[1] !== null ? part.reduce((sum, value) => sum + value, 0) / part.length : null];
  });
}

class Chart {
  constructor(facts, marks) {
    this.facts = facts;
    this.marks = marks;
    this.log = facts.log;
    this.off = new Set();
    this.width = 1;
    this.box = element("figure", { class: "chart" });
    this.box.style.margin = 0;
    this.positive = facts.lines.every((line) => line.points.every((point) => point[1] === null || point[1] > 0));
    this.draw();
  }

  draw() {
    const { title, unit, note, lines } = this.facts;
    const heading = element("h3", {}, element("bdi", { text: title + (unit ? ` (${unit})` : "") }));
    if (this.positive) {
      const press = () => { this.log = !this.log; this.draw(); };
      heading.append(element("button", { type: "button", text: "log", title: "logarithmic axis", "aria-pressed": this.log, onclick: press }));
    }
    this.box.replaceChildren(heading, this.picture());
    if (lines.length > 1 || lines[0].name.toLowerCase() !== title.toLowerCase()) this.box.append(this.legend());
    if (note) this.box.append(element("div", { class: "small", text: note }));
  }

  legend() {
    const legend = element("div", { class: "legend" });
    this.facts.lines.forEach((line, place) => {
      const press = () => { this.off.has(place) ? this.off.delete(place) : this.off.add(place); this.draw(); };
      const key = element("button", { type: "button", "aria-pressed": !this.off.has(place), onclick: press });
      key.append(element("span", { class: `key s${place % 8}` }), element("bdi", { text: line.name }));
      legend.append(key);
    });
    return legend;
  }

  scales() {
    const shown = this.facts.lines.filter((_, place) => !this.off.has(place));
    const points = shown.flatMap((line) => line.points).filter((point) => point[1] !== null);
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [step, value] of points) {
      left = Math.min(left, step); right = Math.max(right, step);
      low = Math.min(low, value); high = Math.max(high, value);
    }
    if (!points.length) [left, right, low, high] = [0, 1, 0.1, 1];
    if (left === right) { left -= 1; right += 1; }
    if (low === high) { const room = Math.abs(low) * 0.1 || 1; low = this.log ? low / 2 : low - room; high = this.log ? high * 2 : high + room; }
    const bend = this.log ? Math.log10 : (value) => value;
    const room = this.log ? 0 : (high - low) * 0.05;
    const [bottom, top] = [bend(low) - room, bend(high) + room];
    return { left, right, low, high, x: (step) => 66 + 462 * (step - left) / (right - left), y: (value) => 185 - 170 * (bend(value) - bottom) / (top - bottom) };
  }

  picture() {
    const scale = this.scales();
    const svg = element("svg", { viewBox: "0 0 540 215", role: "img", "aria-label": this.facts.title });
    for (const value of this.log ? logTicks(scale.low, scale.high) : ticks(scale.low, scale.high, 4)) {
      svg.append(element("line", { class: "grid", x1: 66, x2: 528, y1: scale.y(value), y2: scale.y(value) }));
      svg.append(element("text", { x: 60, y: scale.y(value) + 4, "text-anchor": "end", text: shownNumber(value) }));
    }
    for (const step of ticks(scale.left, scale.right, 6).filter(Number.isInteger)) {
      svg.append(element("text", { x: scale.x(step), y: 205, "text-anchor": "middle", text: step }));
    }
    for (const step of this.marks.filter((one) => one >= scale.left && one <= scale.right)) {
      const mark = element("line", { class: "resume", x1: scale.x(step), x2: scale.x(step), y1: 10, y2: 185 });
      mark.append(element("title", { text: `resumed from step ${step}` }));
      svg.append(mark);
    }
    this.facts.lines.forEach((line, place) => { if (!this.off.has(place)) this.drawLine(svg, scale, line, place); });
    this.follow(svg, scale);
    return svg;
  }

  drawLine(svg, scale, line, place) {
    const dashed = Math.floor(place / 8) % 2 ? " dashed" : "";
    const path = (points) => {
      let text = "", pen = "M";
      for (const [step, value] of points) {
        if (value === null) { pen = "M"; continue; }
        text += `${pen}${scale.x(step).toFixed(1)} ${scale.y(value).toFixed(1)}`;
        pen = "L";
      }
      return text;
    };
    if (this.width > 1 && !line.sparse) svg.append(element("path", { class: `raw s${place % 8}`, d: path(line.points) }));
    svg.append(element("path", { class: `s${place % 8}${dashed}`, d: path(line.sparse ? line.points : smoothed(line.points, this.width)) }));
    if (line.sparse || line.points.length < 3) {
      for (const [step, value] of line.points) {
        if (value !== null) svg.append(element("circle", { class: `s${place % 8}`, cx: scale.x(step), cy: scale.y(value), r: 3 }));
      }
    }
  }

  follow(svg, scale) {
    const cursor = element("line", { class: "cursor hidden", y1: 10, y2: 185 });
    svg.append(cursor);
    const steps = [...new Set(this.facts.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const leave = () => { cursor.classList.add("hidden"); this.box.querySelector(".tip")?.remove(); };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      if (!steps.length) return;
      const frame = svg.getBoundingClientRect();
      const at = scale.left + (((event.clientX - frame.left) / frame.width) * 540 - 66) / 462 * (scale.right - scale.left);
      const step = steps.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best));
      leave();
      cursor.classList.remove("hidden");
      cursor.setAttribute("x1", scale.x(step));
      cursor.setAttribute("x2", scale.x(step));
      const tip = element("div", { class: "tip" }, element("div", { text: `step ${step}` }));
      this.facts.lines.forEach((line, place) => {
        const point = line.points.find((one) => one[0] === step);
        if (!point || this.off.has(place)) return;
        tip.append(element("div", {}, element("span", { class: `key s${place % 8}` }), element("bdi", { text: `${line.name}: ${shownNumber(point[1])}` })));
      });
      this.box.append(tip);
      const edge = this.box.getBoundingClientRect();
      tip.style.left = `${Math.max(0, Math.min(event.clientX - edge.left + 12, edge.width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${event.clientY - edge.top + 12}px`;
    });
  }
}

function drawCharts(place, charts, marks) {
  if (!charts.length) {
    place.append(element("p", { class: "note", text: "No step has been logged yet." }));
    return;
  }
  const all = charts.map((facts) => [facts, new Chart(facts, marks)]);
  const choose = element("select", { "aria-label": "smoothing" });
  for (const width of [1, 5, 20, 100]) choose.append(element("option", { value: width, text: width === 1 ? "as logged" : `mean of ${width} steps` }));
  choose.addEventListener("change", () => all.forEach(([, chart]) => { chart.width = Number(choose.value); chart.draw(); }));
  place.before(element("div", { class: "bar" }, element("label", {}, "curves ", choose)));
  place.append(...all.filter(([facts]) => facts.main).map(([, chart]) => chart.box));
  const rest = all.filter(([facts]) => !facts.main).map(([, chart]) => chart.box);
  if (rest.length) {
    const inner = element("div", { class: "charts" }, ...rest);
    place.after(element("details", { id: "more-curves" }, element("summary", { text: `${rest.length} more` }), inner));
  }
}
