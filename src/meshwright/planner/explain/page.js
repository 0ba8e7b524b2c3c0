"use strict";
const data = JSON.parse(document.getElementById("plans").textContent);
const best = data.plans[0];
const GIB = 2 ** 30;
const CLASSES = {
  parameters: ["parameters", 1], master: ["fp32 master weights", 5], gradients: ["gradients", 2],
  optimizer: ["optimizer state", 3], outer: ["outer state", 7], buffers: ["buffers", 8], activations: ["activations", 4],
  recomputation: ["recomputed activations", 6], returned: ["activations brought back", 7], gathered: ["gathered", 5],
  average: ["averaged weights", 6], updating: ["held while updating", 3],
  visiting: ["offloaded states under way", 8],
};
const PATTERNS = { gathered: "/", returned: "/", average: "/", updating: "/", visiting: "/" };
const MOMENTS = { gather: "arrival", loss: "loss", recomputation: "last block", reduction: "last reduction", update: "update" };
const PARTS = {
  compute_s: ["computing", 1], inline_s: ["collectives waited for", 2], exposed_s: ["gathers, reductions", 3],
  copies_s: ["copies", 6], bubble_s: ["bubble", 4], update_s: ["update", 5], overhead_s: ["launch, batch, loss", 8],
};
const LANES = {
  compute: ["computing", 1], collective: ["collectives waited for", 2], gather: ["gathers", 3], reduce: ["reductions", 4],
  send: ["sends", 7], copy: ["copies", 6], update: ["update", 5], host: ["launch, batch, loss", 8],
};

const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const known = (value) => value !== null && value !== undefined;
const gib = (bytes) => bytes >= GIB ? (bytes / GIB).toFixed(bytes >= 10 * GIB ? 1 : 2) + " GiB"
  : bytes >= GIB / 1024 ? (bytes * 1024 / GIB).toFixed(1) + " MiB" : (bytes / 1024).toFixed(1) + " KiB";
/** For plotly, whose texts may hold tags: those of a name are shown. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const percent = (share, digits = 1) => (100 * share).toFixed(digits) + " %";

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0) + " s";
  if (size >= 1) return value.toFixed(2) + " s";
  return size >= 1e-4 || size === 0 ? (value * 1e3).toFixed(1) + " ms" : (value * 1e6).toFixed(0) + " µs";
}

/** Of a whole run. */
function duration(value) {
  for (const [unit, name] of [[86400, "days"], [3600, "h"], [60, "min"]])
    if (value >= 2 * unit) return (value / unit).toFixed(1) + " " + name;
  return seconds(value);
}

function number(value) {
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]])
    if (Math.abs(value) >= limit) return (value / limit).toFixed(2) + " " + unit;
  return Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(2);
}

const signed = (value, text) => (value < 0 ? "−" : "+") + text(Math.abs(value));
const reserved = (plan) => Math.max(...plan.memory.ranks.map((rank) => rank.reserved_bytes));
const allocated = (plan) => Math.max(...plan.memory.ranks.map((rank) => rank.allocated_bytes));
const rate = (plan) => plan.time.tokens_per_s ?? plan.time.samples_per_s;
const unit = known(best.time?.tokens_per_s) ? "tokens/s" : "samples/s";

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  return made;
}

function table(where, columns, rows) {
  const head = element("tr");
  for (const column of columns) head.append(element("th", column.name, column.text ? "text" : ""));
  const body = rows.map((row) => {
    const line = element("tr", "", row.className ?? "");
    row.cells.forEach((cell, index) => line.append(element("td", cell, columns[index].text ? "text" : "")));
    return line;
  });
  where.replaceChildren(element("thead"), element("tbody"));
  where.tHead.append(head);
  where.tBodies[0].append(...body);
}

function about() {
  const search = data.search;
  const said = [Object.entries(data.model).filter(([key]) => key !== "name" && key !== "dimensions").map(([key, value]) =>
    key === "num_parameters" ? number(value) + " parameters" : `${key.replaceAll("_", " ")} ${value}`).join(", ")];
  if (search.num_considered > 1) said.push(`${search.num_considered.toLocaleString("en")} strategies considered, ` +
    `${search.num_predicted.toLocaleString("en")} simulated in ${search.seconds.toFixed(1)} s`);
  byId("about").textContent = said.filter(Boolean).join("; ");
}

function cards() {
  const time = best.time;
  const figures = [];
  if (time) {
    figures.push([seconds(time.step_time_s), "a step"], [number(rate(best)), unit]);
    if (known(time.tokens_per_s_per_device)) figures.push([number(time.tokens_per_s_per_device), "tokens/s per device"]);
    if (known(time.mfu)) figures.push([percent(time.mfu), "MFU"]);
    if (known(time.price_per_billion_tokens_usd))
      figures.push(["$" + number(time.price_per_billion_tokens_usd), "per 10⁹ tokens"]);
    if (best.run) {
      const length = best.run.tokens ? `${number(best.run.tokens)} tokens` : `${number(best.run.steps)} steps`;
      figures.push([duration(best.run.seconds), `the whole run: ${length}`]);
      figures.push([number(best.run.device_hours), "device-hours of the run"]);
      if (known(best.run.price_usd)) figures.push(["$" + number(best.run.price_usd), "of the run"]);
    }
  }
  const limit = known(best.memory.limit_bytes) ? ` of ${gib(best.memory.limit_bytes)}` : "";
  if (time) figures.push([share(best, "inline_s", "exposed_s") || "0 %", "communication not overlapped"]);
  if (share(best, "bubble_s")) figures.push([share(best, "bubble_s"), "pipeline bubble"]);
  figures.push([gib(best.memory.needed_bytes), `peak memory${limit} that a plan may take`]);
  byId("cards").replaceChildren(...figures.map(([value, label]) => {
    const card = element("div", "", "card");
    card.append(element("b", value), element("span", label));
    return card;
  }));
}

/** Of a plan that does not fit: which memory is too small, and by how much. */
function excess({ needed_bytes: needed, limit_bytes: limit, host_bytes: host, host_limit_bytes: room }) {
  const [name, over] = known(limit) && needed > limit ? ["memory", needed - limit] : ["host memory", host - room];
  return `${name}: ${gib(over)} too much`;
}

const bottlenecks = { "tensor or sequence collectives": "layers' communication",
  "data collectives": "communication not overlapped", "copies between memories": "offload copies",
  "pipeline bubble": "bubble" };

/** The share of some parts in a plan's step. */
function share(plan, ...parts) {
  const spent = parts.reduce((sum, part) => sum + (plan.time?.parts_s[part] ?? 0), 0);
  return spent > 1e-6 ? percent(spent / plan.time.step_time_s) : "";
}

function ranking() {
  const priced = data.plans.some((plan) => known(plan.time?.price_per_billion_tokens_usd));
  const ends = data.plans.some((plan) => known(plan.run));
  const columns = [{ name: "#" }, { name: "strategy", text: true }, { name: "batch" }, { name: "step" }, { name: unit },
    ...(ends ? [{ name: "whole run" }] : []),
    { name: "MFU" }, { name: "allocated" }, { name: "reserved" }, ...(priced ? [{ name: "$ / 10⁹ tokens" }] : []),
    { name: "not overlapped" }, { name: "bubble" }, { name: "bottleneck", text: true }];
  const row = (plan, index) => ({
    className: index === 0 ? "first" : plan.fits ? "" : "over",
    cells: [plan.fits ? String(index + 1) : "–", plan.summary, `${plan.num_micro_batches} × ${plan.micro_batch}`,
      plan.time ? seconds(plan.time.step_time_s) : "", plan.time ? number(rate(plan)) : "",
      ...(ends ? [known(plan.run) ? duration(plan.run.seconds) : ""] : []),
      known(plan.time?.mfu) ? percent(plan.time.mfu) : "", plan.time ? gib(allocated(plan)) : gib(plan.memory.needed_bytes),
      plan.time ? gib(reserved(plan)) : "",
      ...(priced ? [known(plan.time?.price_per_billion_tokens_usd) ? number(plan.time.price_per_billion_tokens_usd) : ""] : []),
      share(plan, "inline_s", "exposed_s"), share(plan, "bubble_s"),
      plan.fits ? bottlenecks[plan.time?.binds] ?? plan.time?.binds ?? "" : excess(plan.memory)],
  });
  table(byId("ranking"), columns, [...data.plans, ...data.too_large].map(row));
}

function whyNot() {
  const lines = [...data.plans.slice(1).map((plan, index) => [`${index + 2}. ${plan.summary}: `, plan.against_first]),
    ...data.too_large.map((plan) => [plan.summary + ": ", plan.against_limit])];
  if (!lines.length) return byId("why-not").closest("section").remove();
  byId("why-not").replaceChildren(...lines.map(([name, text]) => {
    const line = element("li");
    line.append(element("b", name), text);
    return line;
  }));
}

const layout = (changes) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("--text"), size: 12 },
  margin: { l: 60, r: 14, t: 10, b: 46 }, legend: { orientation: "h", y: -0.2, x: 0 }, hoverlabel: { align: "left" },
  barmode: "stack", ...changes,
});
const axis = (changes) => ({ gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true, ...changes });

function draw(id, traces, changes) {
  Plotly.react(id, traces, layout(changes), { responsive: true, displaylogo: false, displayModeBar: false });
}

function front(plans) {
  let fastest = -Infinity;
  return [...plans].sort((a, b) => a.memory.needed_bytes - b.memory.needed_bytes || rate(b) - rate(a))
    .filter((plan) => rate(plan) > fastest && (fastest = rate(plan), true));
}

function pareto() {
  const timed = (plans) => plans.filter((plan) => plan.time);
  const points = (plans, name, marker) => ({
    x: plans.map((plan) => plan.memory.needed_bytes / GIB), y: plans.map(rate), text: plans.map((plan) => plain(plan.summary)),
    mode: "markers", name, marker: { size: 10, ...marker },
    hovertemplate: `%{text}<br>%{y:,.0f} ${unit}, %{x:.2f} GiB<extra></extra>`,
  });
  const fits = timed(data.plans), ahead = front(fits), limit = best.memory.limit_bytes / GIB;
  draw("pareto", [
    { x: ahead.map((plan) => plan.memory.needed_bytes / GIB), y: ahead.map(rate), mode: "lines", name: "front",
      line: { color: color("--c8"), dash: "dot", shape: "hv" }, hoverinfo: "skip" },
    points(fits.slice(1), "fits", { color: color("--c1") }),
    points(fits.slice(0, 1), "first", { color: color("--c3"), size: 14, symbol: "star" }),
    ...(data.too_large.length ? [points(timed(data.too_large), "too large", { color: color("--bad"), symbol: "x-thin-open", line: { width: 2 } })] : []),
  ], {
    height: 360, xaxis: axis({ title: { text: "memory needed, GiB" } }), yaxis: axis({ title: { text: unit } }),
    shapes: known(best.memory.limit_bytes) ? [{ type: "line", x0: limit, x1: limit, yref: "paper", y0: 0, y1: 1,
      line: { color: color("--bad"), width: 1, dash: "dash" } }] : [],
  });
}

const wrapped = (text, width = 34) => text.replace(new RegExp(`(.{8,${width}})(?:[ ]|$)`, "g"), "$1<br>").replace(/<br>$/, "");

function parts() {
  const plans = data.plans.filter((plan) => plan.time).slice(0, 6);
  const names = plans.map((plan, index) => `${index + 1}`);
  const all = [...new Set(plans.flatMap((plan) => Object.keys(plan.time.parts_s)))];
  draw("parts", all.map((part) => {
    const [name, place] = PARTS[part] ?? [plain(part.replace(/_s$/, "")), 6];
    return { type: "bar", orientation: "h", name, y: names, x: plans.map((plan) => plan.time.parts_s[part] ?? 0),
      marker: { color: color(`--c${place}`) }, customdata: plans.map((plan) => wrapped(plain(plan.summary), 60)),
      hovertemplate: `${name}: %{x:.4f} s<br>%{customdata}<extra></extra>` };
  }), { height: 360, yaxis: axis({ autorange: "reversed", type: "category", title: { text: "plan" } }),
    xaxis: axis({ title: { text: "seconds" } }), legend: { orientation: "h", y: -0.32, x: 0 } });
}

/** Ranks of a pipeline that hold the same become one. */
function alike(ranks) {
  const groups = [];
  for (const rank of ranks) {
    const last = groups[groups.length - 1];
    if (last && JSON.stringify(last.moments) === JSON.stringify(rank.moments)) last.to = rank.rank;
    else groups.push({ from: rank.rank, to: rank.rank, moments: rank.moments });
  }
  return groups;
}

function memory(plan) {
  const groups = alike(plan.memory.ranks), single = plan.memory.ranks.length === 1;
  const label = (group) => single ? "every rank" : group.from === group.to ? `rank ${group.from}` : `ranks ${group.from}–${group.to}`;
  const bars = groups.flatMap((group) => Object.entries(group.moments).map(([moment, held]) => ({ label: label(group), moment: MOMENTS[moment] ?? moment, held })));
  const held = new Set([...Object.keys(CLASSES), ...bars.flatMap((bar) => Object.keys(bar.held))]);
  const used = [...held].filter((name) => !/^(host|disk)_/.test(name) && bars.some((bar) => bar.held[name]));
  const shown = (name) => CLASSES[name] ?? [plain(name), 6];
  const limit = plan.memory.limit_bytes / GIB;
  byId("memory").style.minWidth = Math.max(300, bars.length * 46) + "px";
  draw("memory", used.map((name) => ({
    type: "bar", name: shown(name)[0],
    marker: { color: color(`--c${shown(name)[1]}`), pattern: { shape: PATTERNS[name] ?? "" } },
    x: [bars.map((bar) => bar.label), bars.map((bar) => bar.moment)], y: bars.map((bar) => (bar.held[name] ?? 0) / GIB),
    hovertemplate: `${shown(name)[0]}: %{y:.3f} GiB<extra></extra>`,
  })), {
    height: 420, xaxis: axis({ tickangle: bars.length > 8 ? -60 : 0 }), yaxis: axis({ title: { text: "GiB" } }),
    legend: { orientation: "h", y: bars.length > 8 ? -0.45 : -0.25, x: 0 },
    shapes: known(plan.memory.limit_bytes) ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit,
      line: { color: color("--bad"), width: 1, dash: "dash" } }] : [],
  });
}

function timeline() {
  const drawn = data.timeline;
  if (!drawn) return byId("timeline").closest("section").remove();
  const several = new Set(drawn.events.map((event) => event.rank)).size > 1;
  // What a rank does one after the other is one row; what runs beside it has rows of its own.
  const beside = { gather: "gathers", reduce: "reductions", send: "sends", copy: "copies" };
  const row = (event) => (several ? `rank ${event.rank} ` : "") + (beside[event.lane] ?? "computing");
  const order = Object.keys(LANES);
  const rows = [...new Set([...drawn.events].sort((a, b) => a.rank - b.rank || order.indexOf(a.lane) - order.indexOf(b.lane)).map(row))];
  const bars = (events, name, marker, extra = {}) => ({
    type: "bar", orientation: "h", name, y: events.map(row), base: events.map((event) => event.start_s),
    x: events.map((event) => event.end_s - event.start_s), marker,
    text: events.map((event) => `${plain(event.name)}<br>${seconds(event.end_s - event.start_s)}, from ${seconds(event.start_s)}${event.critical ? "<br>on the critical path" : ""}`),
    textposition: "none", hovertemplate: "%{text}<extra></extra>", ...extra,
  });
  const traces = order.map((lane) => [lane, drawn.events.filter((event) => event.lane === lane)]).filter(([, events]) => events.length)
    .map(([lane, events]) => bars(events, LANES[lane][0], {
      color: color(`--c${LANES[lane][1]}`), opacity: events.map((event) => (event.critical ? 1 : 0.55)),
      line: { width: events.length > 600 ? 0 : 0.7, color: color("--back") },
    }));
  byId("timeline-note").textContent = `${drawn.summary}: ${seconds(drawn.step_time_s)}. ` +
    "What is on the critical path is drawn in full colour; drag to zoom, double-click for the whole step.";
  draw("timeline", traces, {
    barmode: "overlay", height: 120 + 24 * rows.length, bargap: 0.15,
    yaxis: axis({ type: "category", categoryorder: "array", categoryarray: rows, autorange: "reversed", fixedrange: true }),
    xaxis: axis({ title: { text: "seconds" }, range: [0, drawn.step_time_s] }), legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0 },
    margin: { l: 60, r: 14, t: 40, b: 46 },
  });
}

function difference() {
  const where = byId("difference"), [first] = data.differences;
  if (!first) return where.remove();
  where.replaceChildren(element("h2", "The first plan against the second"), element("p", `${first.first}  →  ${first.second}`, "note"));
  const effects = element("table"), sums = element("table"), columns = [{ name: "change", text: true }, { name: "step" }, { name: "memory" }];
  const rows = first.effects.length
    ? first.effects.map((effect) => ({ cells: [effect.change, known(effect.step_time_s) ? signed(effect.step_time_s, seconds) : "", signed(effect.needed_bytes, gib)] }))
    : first.changes.map((change) => ({ cells: [change, "", ""] }));
  table(effects, columns, rows);
  table(sums, [{ name: "part or class", text: true }, { name: "step" }, { name: "memory" }], [
    ...Object.entries(first.seconds).filter(([, delta]) => Math.abs(delta) > 1e-6).map(([part, delta]) => ({ cells: [PARTS[part]?.[0] ?? part, signed(delta, seconds), ""] })),
    ...Object.entries(first.num_bytes).map(([name, delta]) => ({ cells: [CLASSES[name]?.[0] ?? name, "", signed(delta, gib)] })),
  ]);
  for (const [heading, made] of [["Change by change", effects], ["By part of the step and class of memory", sums]]) {
    const scroll = element("div", "", "scroll");
    scroll.append(made);
    where.append(element("h3", heading), scroll);
  }
}

function whatIf() {
  const where = byId("whatif");
  if (!data.what_if.length) return where.remove();
  const made = element("table"), scroll = element("div", "", "scroll");
  table(made, [{ name: "if there were", text: true }, { name: "speed" }, { name: "then", text: true }],
    data.what_if.map((each) => ({ cells: [each.change, known(each.speed_up) ? "× " + each.speed_up.toFixed(2) : "–", each.outcome] })));
  scroll.append(made);
  where.replaceChildren(element("h2", "What if"), scroll);
}

function remarks() {
  const lines = [...best.gaps.map((gap) => `Not predicted: ${gap}`), ...best.notices, ...data.search.refused.map((each) => `ruled out: ${each.strategy}: ${each.reason}`)];
  if (!lines.length) return byId("remarks").remove();
  const list = element("ul");
  list.append(...lines.map((line) => element("li", line)));
  byId("remarks").replaceChildren(element("h2", "Remarks"), list);
}

function charts() {
  if (best.time) { pareto(); parts(); } else document.querySelector(".pair").remove();
  memory([...data.plans, ...data.too_large][byId("memory-plan").value]);
  timeline();
}

about();
cards();
byId("why").replaceChildren(...data.why.map((line) => element("li", line)));
ranking();
whyNot();
difference();
whatIf();
remarks();
byId("memory-plan").replaceChildren(...[...data.plans, ...data.too_large].map((plan, index) => {
  const option = element("option", plan.summary);
  option.value = index;
  return option;
}));
byId("memory-plan").addEventListener("change", charts);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
charts();
document.documentElement.dataset.ready = "yes";
