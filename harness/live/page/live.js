"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};
const number = (x) => x == null ? "–" : x >= 10000 ? Math.round(x / 1000) + "k" : x >= 100 ? Math.round(x).toString()
  : x >= 10 ? x.toFixed(1).replace(/\.0$/, "") : x.toFixed(2).replace(/\.?0+$/, "");
const percent = (x) => x == null ? "–" : (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + " %";
const ms = (x) => x == null ? "–" : x >= 10000 ? (x / 1000).toFixed(1) + " s" : Math.round(x) + " ms";
const bytes = (x) => {
  if (x == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let i = 0;
  while (x >= 1000 && i < units.length - 1) { x /= 1000; i++; }
  return number(x) + " " + units[i];
};
let lastSeen = 0, failures = 0;

async function flip(component, action) {
  await fetch(`/switch/${component}/${action}`, {method: "POST", headers: {"x-live": "1"}});
  refresh();
}

function bar(kind, label, share, text) {
  const fill = make("b");
  fill.style.width = Math.min(100, 100 * share) + "%";
  return make("div", {className: "bar " + kind}, make("span", {textContent: label}), make("i", {}, fill),
    make("span", {textContent: text}));
}

function worker(w, most, recent, switches, tiered) {
  const hit = recent.some((r) => r.worker === w.name && r.t > lastSeen);
  const card = make("article", {className: "worker" + (w.up ? "" : " down") + (hit ? " hit" : "")});
  const title = make("h3", {}, make("span", {className: "dot" + (w.up ? "" : " off"), textContent: w.name}),
    make("small", {textContent: w.role || (w.up ? "" : "down")}));
  card.append(title, make("div", {className: "where", textContent: w.address}),
    bar("run", "running", w.running / most, number(w.running)),
    bar("wait", "waiting", w.waiting / most, number(w.waiting)),
    bar("kv", "KV in use", w.kv, percent(w.kv)),
    bar("hitrate", "cache hits", w.hit_rate || 0, percent(w.hit_rate)));
  if (tiered) card.append(bar("hitrate", "from tiers", w.tier_rate || 0, percent(w.tier_rate)));
  card.append(make("p", {textContent: `${number(w.generated_per_s)} tok/s out, ${number(w.prompt_per_s)} tok/s in, `
    + `TTFT ${w.ttft_s == null ? "–" : ms(1000 * w.ttft_s)}, ${number(w.requests)} done`}));
  if (w.restarts) card.append(make("p", {textContent: `restarted ${w.restarts}×: its KV events count from 0 again; what `
    + "the router remembers of it from before is gone from its cache"}));
  if (switches) {
    const action = w.up ? "kill" : "start";
    card.append(make("p", {}, make("button", {textContent: action, title: `${action} the process that serves ${w.name}`, onclick: () => flip(w.name, action)})));
  }
  return card;
}

/** The next 1, 2 or 5 times a power of ten. */
const rounded = (x) => {
  const ten = 10 ** Math.floor(Math.log10(x));
  return ten * [1, 2, 5, 10].find((step) => step * ten >= x);
};

function chart(svg, rows, keys) {
  const width = svg.clientWidth || 300, height = svg.clientHeight || 112, left = 34, bottom = 4, top = 8;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const most = rounded(Math.max(1, ...rows.map((r) => Math.max(...keys.map((k) => r[k])))));
  const node = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  for (const share of [0, 0.5, 1]) {
    const y = height - bottom - share * (height - bottom - top);
    node("line", {x1: left, x2: width, y1: y, y2: y, class: "grid"});
    node("text", {x: left - 4, y: Math.max(10, y + 3), "text-anchor": "end"}, number(share * most));
  }
  if (rows.length < 2) return;
  const end = rows[rows.length - 1].t, span = 120;
  keys.forEach((key, i) => {
    const points = rows.filter((r) => end - r.t <= span).map((r) => {
      const x = left + (1 - (end - r.t) / span) * (width - left - 2);
      const y = height - bottom - r[key] / most * (height - bottom - top);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    node("path", {d: "M" + points.join("L"), class: "ab"[i]});
  });
}

const cell = (text, kind = "num") => make("td", {className: kind, textContent: text});

function tier(t) {
  const share = t.capacity ? t.resident / t.capacity : 0;
  return make("tr", {}, cell(t.name + (t.node === "" ? "" : ` of node ${t.node}`), ""),
    make("td", {className: "wide"}, t.capacity ? bar("kv", "", share, percent(share)) : t.resident == null ? "–" : "unlimited"),
    cell(bytes(t.resident)), cell(percent(t.hit_rate)), cell(bytes(t.read_per_s)), cell(bytes(t.written_per_s)),
    cell(bytes(t.evicted)));
}

function link(l) {
  return make("tr", {}, cell(`${l.kind} (${l.links})`, ""), cell(l.busiest, "wide"),
    cell(percent(l.use)), cell(bytes(l.rate)), cell(bytes(l.rate_all)), cell(bytes(l.bytes_all)));
}

function decision(r) {
  const picked = (name) => name === r.worker || name === r.prefiller;
  const scores = make("div", {className: "scores"});
  const order = ([a, x], [b, y]) => y - x || picked(b) - picked(a);
  for (const [name, value] of Object.entries(r.scores).sort(order).slice(0, 8))
    scores.append(make("span", {className: picked(name) ? "picked" : "", textContent: `${name} ${value.toFixed(2)}`}));
  const bad = r.status >= 400 || r.status === 0;
  return make("tr", {},
    make("td", {textContent: new Date(1000 * r.t).toLocaleTimeString()}),
    make("td", {textContent: r.path.replace("/v1/", ""), title: r.id}),
    make("td", {className: bad ? "bad" : ""}, String(r.status),
      ...Object.entries(r.flags).map(([code, text]) => make("abbr", {textContent: code, title: text}))),
    make("td", {textContent: (r.prefiller ? r.prefiller + " → " : "") + (r.worker || "–")}),
    make("td", {className: "wide"}, scores),
    make("td", {className: "num", textContent: ms(r.first_byte_ms)}),
    make("td", {className: "num", textContent: ms(r.duration_ms)}));
}

function legend(shown) {
  const flags = Object.assign({}, ...shown.map((r) => r.flags));
  const words = Object.entries(flags).sort().map(([code, text]) => `${code}: ${text}.`);
  if (shown.some((r) => Object.keys(r.scores).length)) words.unshift("Bold: the worker that was taken.");
  $("legend").textContent = words.join(" ");
}

function draw(s) {
  $("facts").textContent = `${s.model} · ${s.workers.length} workers (${s.profile})`
    + (s.speed !== 1 ? ` · ${s.speed}× speed` : "") + (s.gateway ? ` · gateway ${s.gateway}` : "");
  const parts = [make("span", {className: "dot" + (s.workers.every((w) => w.up) ? "" : " off"),
    textContent: `workers ${s.workers.filter((w) => w.up).length} of ${s.workers.length} up`})];
  if (s.router) {
    const m = s.router_metrics, up = m.up === 1;
    let text = `router ${s.router}` + (up ? "" : " down");
    if (m.ready != null) text += `, ${number(m.ready)} endpoints ready`;
    if (m.admitted != null) text += `, index: ${number(m.admitted)} blocks admitted, ${number(m.evicted)} evicted`;
    parts.push(make("span", {className: "dot" + (up ? "" : " off"), textContent: text}));
  }
  $("parts").replaceChildren(...parts);
  $("trouble").hidden = !s.problems.length;
  $("trouble").textContent = s.problems.join("; ");
  const sum = (k) => s.workers.reduce((a, w) => a + (w[k] || 0), 0);
  const totals = [["Running", number(sum("running"))], ["Waiting", number(sum("waiting"))],
    ["Tokens out per s", number(sum("generated_per_s"))], ["Tokens in per s", number(sum("prompt_per_s"))],
    ["Done", number(sum("requests"))], ["Refused or failed", number(s.failed)]];
  $("totals").replaceChildren(...totals.map(([k, v]) => make("div", {}, make("dt", {textContent: k}), make("dd", {textContent: v}))));
  chart($("chart-requests"), s.history, ["running", "waiting"]);
  chart($("chart-tokens"), s.history, ["generated", "prompt"]);
  const most = Math.max(4, ...s.workers.map((w) => Math.max(w.running, w.waiting)));
  $("workers").replaceChildren(...s.workers.map((w) => worker(w, most, s.recent, s.switches, s.tiers.length > 0)));
  $("tiers-section").hidden = !s.tiers.length;
  document.querySelector("#tiers tbody").replaceChildren(...s.tiers.map(tier));
  $("links").hidden = !s.links.length;
  document.querySelector("#links tbody").replaceChildren(...s.links.map(link));
  $("served").textContent = s.served ? `${number(s.served)} through the gateway` : "";
  $("none").hidden = $("try").hidden = s.recent.length > 0 || !s.gateway;
  $("try").textContent = s.curl || "";
  $("recent").hidden = !s.recent.length;
  document.querySelector("#recent tbody").replaceChildren(...s.recent.slice(0, 30).map(decision));
  legend(s.recent.slice(0, 30));
  $("benches-section").hidden = !s.benches.length;
  $("benches").replaceChildren(...s.benches.map((b) => {
    const item = make("li", {}, `${b.name}: ${number(b.done)} of ${number(b.calls)} calls `,
      make("progress", {max: Math.max(1, b.calls), value: b.done}), " ");
    if (b.report) item.append(make("a", {href: `/results/${encodeURIComponent(b.name)}/report.html`, textContent: "report"}));
    return item;
  }));
  lastSeen = Math.max(lastSeen, ...s.recent.map((r) => r.t), 0);
}

async function refresh() {
  try {
    const state = await (await fetch("/state", {cache: "no-store"})).json();
    failures = 0;
    draw(state);
    document.documentElement.dataset.ready = "1";
  } catch (error) {
    if (++failures > 2) {
      $("trouble").hidden = false;
      $("trouble").textContent = "The harness does not answer any more.";
    }
  }
}
refresh();
setInterval(refresh, 1000);
