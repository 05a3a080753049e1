"use strict";
// Draws what /live/stream tells. Everything shown is set as text, nothing as HTML.

const $ = (id) => document.getElementById(id);
const state = { turns: [], sessions: [], workers: [], slices: new Map(), now: 0, offset: 0 };
const KEPT_TURNS = 150, SHOWN_TURNS = 60, MINUTES = 15, calm = matchMedia("(prefers-reduced-motion: reduce)");

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "circle", "line", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "width%") node.style.width = `${value}%`; else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const number = (value) => value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const percent = (part, whole) => whole ? `${Math.round(100 * part / whole)} %` : "–";
const ms = (value) => value == null ? "–" : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(value < 9950 ? 2 : 1)} s`;
function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 60 ? `${whole} s` : whole < 3600 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${Math.floor(whole / 3600)} h`;
}
const ago = (at) => span(state.now - at);

// What a turn was, in one word: its colour everywhere.
function kind(turn) {
  if (turn.outcome !== "ok") return "bad";
  if (turn.route.startsWith("decode")) return turn.reused_tokens ? "local" : "alone";
  if (!turn.reused_tokens) return "cold";
  return turn.route === "cold-prefill" ? "cache" : "pull";
}
const KINDS = [["pull", "pulled from decode"], ["cache", "prefill's own cache"], ["local", "still on decode"], ["cold", "computed"], ["alone", "decode alone"], ["bad", "failed or left"]];

function shares(turn) {
  const prompt = turn.prompt_tokens || 1, local = kind(turn) === "local" ? turn.reused_tokens : 0;
  const pulled = local ? 0 : turn.pulled_tokens ?? turn.reused_tokens, cache = Math.max(0, turn.reused_tokens - pulled - local);
  return make("div", { class: "bar", title: `${turn.prompt_tokens} tokens: ${pulled} from decode, ${local} still there, ${cache} from prefill's cache, ${turn.prompt_tokens - turn.reused_tokens} computed` },
    make("span", { class: "pull", "width%": 100 * pulled / prompt }),
    make("span", { class: "local", "width%": 100 * local / prompt }),
    make("span", { class: "cache", "width%": 100 * cache / prompt }),
    turn.prompt_tokens ? make("span", { class: "computed", "width%": 100 * (turn.prompt_tokens - turn.reused_tokens) / prompt }) : null);
}
// Time to the first token if the prompt had been prefilled cold.
const asCold = (turn) => turn.cold_prefill_ms == null ? null : turn.ttft_ms - (turn.legs_ms.prefill || 0) + turn.cold_prefill_ms;

// Tiles.
function drawTiles() {
  const sum = { turns: 0, returning: 0, hits: 0, prompt: 0, reused: 0 };
  const warm = [], estimated = [];
  for (const slice of state.slices.values()) {
    if (slice.start < state.now - 300) continue;
    sum.turns += slice.turns; sum.returning += slice.returning; sum.hits += slice.hits;
    sum.prompt += slice.prompt_tokens; sum.reused += slice.reused_tokens;
    if (slice.warm_ms != null) warm.push(slice.warm_ms);
    if (slice.warm_as_cold_ms != null) estimated.push(slice.warm_as_cold_ms);
  }
  const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? null;
  const [reused, cold] = [middle(warm), middle(estimated)];
  const pinned = state.workers.filter((each) => each.role === "decode" && each.pin_limit_blocks);
  const total = (field) => pinned.reduce((all, each) => all + (each[field] || 0), 0);
  const tiles = [
    [percent(sum.hits, sum.returning), "returning turns reused", sum.hits > 0],
    [percent(sum.reused, sum.prompt), "prompt tokens not computed", sum.reused > 0],
    [ms(reused), cold ? `to first token; cold ≈ ${ms(cold)}` : "to first token with reuse", cold && reused < cold],
    [cold && reused ? `${number(cold / reused)}×` : "–", "sooner than cold (estimated)", cold && reused < cold],
    [pinned.length ? percent(total("pinned_blocks"), total("pin_limit_blocks")) : "–", "of the room for kept KV", false],
    [number(sum.turns / 300), `turns a second, ${state.in_flight} under way${state.queued ? `, ${state.queued} waiting` : ""}`, false],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, text, good]) =>
    make("div", { class: "tile" }, make("b", good ? { class: "good" } : {}, value), make("span", {}, text))));
}

// The next number that is easy to read on an axis.
function round(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 4, 6, 8, 10].find((each) => each * unit >= value * 1.02);
}
// Charts: lines over the last quarter of an hour.
function drawChart(id, lines, unit, top) {
  const svg = $(id), W = svg.clientWidth || 500, H = svg.clientHeight || 170, left = 46, right = 8, bottom = 20, head = 10;
  // A young proxy's chart begins with its first turn.
  const first = Math.min(state.now, ...state.slices.keys());
  const seconds = [120, 300, 600, MINUTES * 60].find((each) => each >= state.now - first) || MINUTES * 60;
  const oldest = state.now - seconds;
  const slices = [...state.slices.values()].filter((slice) => slice.start >= oldest).sort((a, b) => a.start - b.start);
  const points = lines.map(([name, value]) => [name, slices.map((slice) => [Math.min(state.now, slice.start + 5), value(slice)]).filter((point) => point[1] != null)]);
  const highest = top ?? round(Math.max(1, ...points.flatMap(([, list]) => list.map((point) => point[1]))));
  const x = (at) => left + (W - left - right) * (at - oldest) / seconds;
  const y = (value) => H - bottom - (H - bottom - head) * Math.min(1, value / highest);
  const parts = [];
  for (let step = 0; step <= 4; step++) {
    const value = highest * step / 4;
    parts.push(make("line", { class: "grid", x1: left, x2: W - right, y1: y(value), y2: y(value) }));
    if (step % 2 === 0) parts.push(make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, unit(value)));
  }
  for (const share of [1, 0.5, 0]) {
    const minutes = seconds * share / 60, anchor = share === 1 ? "start" : share ? "middle" : "end";
    parts.push(make("text", { x: x(state.now - minutes * 60), y: H - 5, "text-anchor": anchor }, minutes ? `−${number(minutes)} min` : "now"));
  }
  for (const [name, list] of points) {
    let path = "", before = -Infinity;
    for (const [at, value] of list) {
      path += `${at - before > 45 ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      before = at;
    }
    if (path) parts.push(make("path", { class: name, d: path }));
    if (list.length) parts.push(make("circle", { class: name, cx: x(list.at(-1)[0]), cy: y(list.at(-1)[1]), r: 3 }));
  }
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.replaceChildren(...parts);
}
function drawCharts() {
  drawChart("ttft", [["estimate", (s) => s.warm_as_cold_ms], ["cold", (s) => s.cold_ms], ["pull", (s) => s.warm_ms]], ms);
  drawChart("hits", [["cold", (s) => s.prompt_tokens ? s.reused_tokens / s.prompt_tokens : null], ["pull", (s) => s.returning ? s.hits / s.returning : null]],
    (value) => `${Math.round(value * 100)} %`, 1);
}

// The picture of the flow.
const places = new Map();
let drawnFlow = "";
function drawFlow() {
  const svg = $("flow"), W = Math.max(320, svg.clientWidth || 900), narrow = W < 620, H = narrow ? 290 : 240;
  const wanted = JSON.stringify([W, state.workers.map((w) => [w.name, w.healthy, w.outstanding, w.paused, w.pinned_blocks])]);
  if (wanted === drawnFlow) return;
  drawnFlow = wanted;
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.style.height = `${H}px`;
  places.clear();
  const edges = make("g"), nodes = make("g"), middle = H / 2;
  const proxyX = narrow ? 122 : W * 0.34;
  place("clients", narrow ? 38 : 70, middle);
  place("proxy", proxyX, middle);
  const from = narrow ? 164 : W * 0.5, room = W - from - 6;
  for (const role of ["prefill", "decode"]) {
    const workers = state.workers.filter((worker) => worker.role === role).slice(0, narrow ? 3 : 6);
    workers.forEach((worker, at) => {
      const width = Math.min(190, room / workers.length - 8);
      const cx = from + room * (at + 0.5) / workers.length, cy = role === "prefill" ? 44 : H - 50;
      place(worker.name, cx, cy);
      nodes.append(workerNode(worker, cx, cy, width));
      edges.append(make("path", { class: "edge", d: curve("proxy", worker.name) }));
    });
  }
  for (const p of state.workers.filter((w) => w.role === "prefill" && places.has(w.name)))
    for (const d of state.workers.filter((w) => w.role === "decode" && places.has(w.name)))
      edges.append(make("path", { class: "edge kv", d: curve(p.name, d.name) }));
  edges.append(make("path", { class: "edge", d: curve("clients", "proxy") }));
  nodes.append(simpleNode("clients", "clients", 0), simpleNode("proxy", "proxy", 0));
  const dots = make("g", { id: "dots" });
  svg.replaceChildren(edges, dots, nodes);  // turns pass behind the boxes
}
function place(name, x, y) { places.set(name, [x, y]); }
function curve(one, other) {
  const [x1, y1] = places.get(one), [x2, y2] = places.get(other);
  if (Math.abs(x1 - x2) < 4 || y1 === y2) return `M${x1} ${y1}L${x2} ${y2}`;
  return Math.abs(y2 - y1) > 120 ? `M${x1} ${y1}C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2} ${x2} ${y2}`
    : `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
}
function simpleNode(name, text) {
  const [x, y] = places.get(name), width = text.length * 8 + 14;
  return make("g", { class: "node" }, make("rect", { x: x - width / 2, y: y - 19, width, height: 38, rx: 10 }), make("text", { x, y: y + 4 }, text));
}
function workerNode(worker, x, y, width) {
  const short = worker.name.length * 7.4 > width - 8 ? worker.name.replace(/^.*:/, ":") : worker.name;
  const load = `${worker.outstanding} ${worker.outstanding === 1 ? "turn" : "turns"}`;
  const node = make("g", { class: worker.healthy && !worker.paused.length ? "node" : "node down" },
    make("title", {}, `${worker.role} ${worker.name}`),
    make("rect", { x: x - width / 2, y: y - 30, width, height: 62, rx: 10 }),
    make("text", { x, y: y - 12, class: "soft" }, worker.role), make("text", { x, y: y + 5 }, short),
    make("text", { x, y: y + 21, class: "soft" }, worker.healthy ? load : "down"));
  if (worker.role === "decode" && worker.pin_limit_blocks) {
    const inner = width - 16, share = Math.min(1, (worker.pinned_blocks || 0) / worker.pin_limit_blocks);
    node.append(make("rect", { class: "meter-back", x: x - inner / 2, y: y + 25, width: inner, height: 4, rx: 2 }),
      make("rect", { class: "meter", x: x - inner / 2, y: y + 25, width: inner * share, height: 4, rx: 2 }));
  }
  return node;
}
let moving = 0;
function travel(turn) {
  if (calm.matches || document.hidden || moving > 40 || !places.size) return;
  const colour = kind(turn), stops = ["clients", "proxy"];
  const P = !turn.route.startsWith("decode") && places.has(turn.prefill) ? turn.prefill : null, D = places.has(turn.decode) ? turn.decode : null;
  if (P) stops.push(P);
  if (D) stops.push(D);
  stops.push("proxy", "clients");
  const paths = stops.slice(1).map((stop, at) => curve(stops[at], stop));
  if (colour === "pull" && P && D) fly([curve(D, P)], "pull", 5, 420);
  fly(paths, colour, 5, 260);
}
function fly(paths, colour, r, each) {
  const dots = $("dots");
  const tracks = paths.map((d) => { const path = make("path", { d }); return [path, path.getTotalLength()]; });
  const dot = make("circle", { class: `dot ${colour}`, r, cx: -20, cy: -20 });
  dots.append(dot); moving++;
  const began = performance.now(), end = each * tracks.length;
  (function step(now) {
    const gone = now - began;
    if (gone >= end || !dot.isConnected) { dot.remove(); moving--; return; }
    const at = Math.max(0, Math.floor(gone / each)), [path, length] = tracks[at];
    const point = path.getPointAtLength(length * Math.min(1, (gone - at * each) / each));
    dot.setAttribute("cx", point.x); dot.setAttribute("cy", point.y);
    requestAnimationFrame(step);
  })(began);
}

// Workers, sessions, turns.
function drawWorkers() {
  $("workers").replaceChildren(...state.workers.map((worker) => {
    const trouble = !worker.healthy ? "down" : worker.paused.length ? `${worker.paused.join(", ")} paused` : "";
    const parts = [make("header", {}, make("b", {}, worker.name), make("span", { class: trouble ? "badge bad" : "badge good" }, trouble || worker.role)),
      make("p", {}, `${worker.role} · `, make("strong", {}, String(worker.outstanding)), worker.outstanding === 1 ? " turn under way" : " turns under way")];
    if (worker.pin_limit_blocks && worker.role === "decode") {
      const share = 100 * (worker.pinned_blocks || 0) / worker.pin_limit_blocks;
      parts.push(make("div", { class: "bar" }, make("span", { class: share > 90 ? "full" : "pull", "width%": Math.min(100, share) })),
        make("p", {}, "keeps ", make("strong", {}, number(worker.pinned_blocks)), ` of at most ${number(worker.pin_limit_blocks)} blocks; budget ${number(worker.budget_blocks)}, ${number(worker.kv_blocks)} in all`));
    } else if (worker.kv_blocks) parts.push(make("p", {}, `${number(worker.kv_blocks)} KV blocks`));
    if (worker.error) parts.push(make("p", {}, worker.error));
    return make("div", { class: "worker" }, ...parts);
  }));
}
function sessionButton(id) {
  const button = make("button", { class: "id", type: "button", title: "History of this session" }, id);
  button.addEventListener("click", () => showHistory(id));
  return button;
}
function fill(table, rows, columns, empty) {
  const body = $(table).tBodies[0];
  body.replaceChildren(...(rows.length ? rows : [make("tr", {}, make("td", { class: "empty", colspan: columns }, empty))]));
}
function drawSessions() {
  fill("sessions", state.sessions.map((session) => {
    const left = session.until ? session.until - state.now : 0, kept = left > 0;
    return make("tr", {},
      make("td", {}, sessionButton(session.id)),
      make("td", {}, kept ? session.worker : make("span", { class: "soft" }, session.until ? "expired" : (session.kept || "nothing kept").replaceAll("_", " "))),
      make("td", { class: "num" }, kept ? number(session.tokens) : "–"),
      make("td", {}, kept ? span(left) : "–"),
      make("td", { class: "num", title: `${session.reused} of them reused` }, `${session.reused}/${session.turns}`),
      make("td", { class: "num soft" }, ago(session.at)));
  }), 6, "No session yet. Send a turn to the proxy.");
}
let newest = 0;
function drawTurns() {
  const turns = state.turns.slice(-SHOWN_TURNS).reverse();
  fill("turns", turns.map((turn) => make("tr", turn.number > newest && newest ? { class: "new" } : {},
    make("td", {}, sessionButton(turn.session)),
    make("td", { title: `${turn.route} · ${turn.outcome}` }, make("span", { class: `route ${kind(turn)}` }), (turn.outcome === "ok" ? turn.reason : turn.outcome).replaceAll("_", " ")),
    make("td", {}, shares(turn)),
    make("td", { class: "num" }, ms(turn.ttft_ms)),
    make("td", { class: "num soft" }, asCold(turn) == null ? "–" : `≈ ${ms(asCold(turn))}`))), 5, "No turn yet.");
  newest = turns.length ? turns[0].number : 0;
}
async function showHistory(id) {
  const dialog = $("history");
  $("history-title").textContent = `Session ${id}`;
  $("history-text").textContent = "";
  $("history-turns").replaceChildren();
  if (!dialog.open) dialog.showModal();
  const answer = await fetch(`live/sessions/${encodeURIComponent(id)}`).catch(() => null);
  if (!answer) { $("history-text").textContent = "The proxy does not answer."; return; }
  // Another process may have answered: it knows other turns of the session than this page does.
  const known = new Map(state.turns.filter((turn) => turn.session === id).map((turn) => [`${turn.request} ${turn.at}`, turn]));
  for (const turn of answer.ok ? (await answer.json()).turns : []) known.set(`${turn.request} ${turn.at}`, turn);
  const turns = [...known.values()].sort((one, other) => one.at - other.at);
  if (!turns.length) { $("history-text").textContent = "No turn of this session is remembered any more."; return; }
  const computed = turns.reduce((all, turn) => all + turn.prompt_tokens - turn.reused_tokens, 0), prompt = turns.reduce((all, turn) => all + turn.prompt_tokens, 0);
  $("history-text").textContent = `${turns.length} turns remembered, ${number(prompt)} prompt tokens, ${number(computed)} of them computed.`;
  $("history-turns").replaceChildren(...turns.map((turn) => {
    const clock = new Date(turn.at * 1000).toLocaleTimeString();
    const cold = asCold(turn), way = [turn.prefill && !turn.route.startsWith("decode") ? `prefill ${turn.prefill}` : null, turn.decode ? `decode ${turn.decode}` : null].filter(Boolean).join(" → ");
    const legs = Object.entries(turn.legs_ms).map(([leg, value]) => `${leg} ${ms(value)}`).join(", ");
    const left = turn.holding_left ? `${number(turn.kept_tokens)} tokens left on decode` : `left nothing: ${turn.kept || turn.outcome}`;
    return make("li", {},
      make("div", { class: "top" }, make("span", { class: "soft" }, clock), make("b", {}, make("span", { class: `route ${kind(turn)}` }), turn.route || "no route"), make("span", {}, turn.reason.replaceAll("_", " ")),
        turn.outcome === "ok" ? null : make("span", { class: "badge bad" }, turn.outcome.replaceAll("_", " ")),
        make("span", { class: "soft" }, turn.ttft_ms == null ? "" : `first token ${ms(turn.ttft_ms)}${cold == null ? "" : `, cold ≈ ${ms(cold)}`}`)),
      shares(turn),
      make("div", { class: "more" }, `${number(turn.prompt_tokens)} prompt tokens, ${number(turn.reused_tokens)} reused · ${way} · ${legs} · ${left.replaceAll("_", " ")} · request ${turn.request}`));
  }));
}

function drawNotes() {
  const notes = [];
  if (state.reuse === false) notes.push("reuse is off");
  if (state.draining) notes.push("draining");
  const badges = notes.map((note) => make("span", { class: "badge bad" }, note));
  if (state.processes > 1) badges.push(make("span", { class: "badge", title: "Each process remembers its own turns. Reload to see another." }, `process ${state.process}, one of ${state.processes}`));
  $("notes").replaceChildren(...badges);
}
function draw() { drawNotes(); drawTiles(); drawFlow(); drawCharts(); drawWorkers(); drawSessions(); drawTurns(); }

function take(data, fresh) {
  for (const name of ["now", "process", "processes", "in_flight", "queued", "draining", "reuse", "workers", "sessions"]) state[name] = data[name];
  if (fresh) { state.turns = data.turns; state.slices = new Map(); $("version").textContent = `kvloop ${data.version}`; }
  else {
    state.turns = [...state.turns, ...data.turns].slice(-KEPT_TURNS);
    data.turns.forEach((turn, at) => setTimeout(travel, at * 900 / data.turns.length, turn));
  }
  for (const slice of data.slices) state.slices.set(slice.start, slice);
  for (const start of state.slices.keys()) if (start < state.now - MINUTES * 60 - 20) state.slices.delete(start);
  draw();
}
function say(text, look) { const link = $("link"); link.textContent = text; link.className = `badge ${look}`; }
function listen() {
  const source = new EventSource("live/stream");
  source.addEventListener("snapshot", (event) => { say("live", "good"); take(JSON.parse(event.data), true); });
  source.addEventListener("tick", (event) => take(JSON.parse(event.data), false));
  source.addEventListener("error", () => {
    say("no connection", "bad");
    // A browser gives up after an error answer (a full house); a broken connection it renews.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  });
}

$("legend").replaceChildren(...KINDS.map(([name, text]) => make("span", {}, make("i", { class: name }), text)));
$("theme").addEventListener("click", () => {
  const dark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("kvloop-theme", document.documentElement.dataset.theme); } catch { /* private mode */ }
});
try { const theme = localStorage.getItem("kvloop-theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* private mode */ }
addEventListener("resize", () => { drawnFlow = ""; if (state.now) draw(); });
$("history").addEventListener("click", (event) => { if (event.target === $("history")) $("history").close(); });
listen();
