// The page of `lockstep ui`. Names, notes and messages are chosen by tenants: they become text, never HTML.

const $ = (id) => document.getElementById(id);

/** An element. Children are elements or texts. */
function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== false));
  return element;
}

// --- what the server has told

const sources = new Map(); // id → { id, head, cells: Map(namespace/name → cell), places: Map(namespace → worst cell) }
let namespaces = [];
let cluster = {};
const entries = new Map(); // id → entry

const TONES = {
  "in-step": "ok", missing: "behind", differs: "behind", adopting: "behind", conflict: "bad", unwanted: "leaving",
  "being-deleted": "leaving", "no-namespace": "barred", "namespace-terminating": "barred", excluded: "barred",
  "not-accepted": "barred", "not-seen": "unseen", frozen: "bad",
};
const SEVERITY = ["ok", "unseen", "barred", "leaving", "behind", "bad"];
const LEGEND = [["ok", "in step"], ["behind", "to write"], ["bad", "conflict"], ["leaving", "to remove"], ["barred", "not allowed"], ["none", "none wanted"]];
const SOURCE_TONES = {
  refused: "bad", conflicts: "bad", "deletes-held": "bad", "source-gone": "leaving", "being-deleted": "leaving", paused: "paused",
  behind: "behind", "no-target": "behind", "missing-targets": "behind", "in-step": "ok",
  "not-seen": "unseen", "source-not-seen": "unseen",
};
const ENTRY_TONES = { heal: "heal", normal: "normal", warning: "behind", denial: "denial" };

const toneOf = (cell) => TONES[cell.state] ?? "barred";
const glyph = (tone) => h("span", { class: "glyph", "data-tone": tone });
const byName = new Intl.Collator("en", { numeric: true }).compare;
const number = new Intl.NumberFormat("en");
const plural = (count, one, many = one + "s") => `${number.format(count)} ${count === 1 ? one : many}`;

function age(time, now = Date.now()) {
  const seconds = Math.max(0, Math.round((now - Date.parse(time)) / 1000));
  if (seconds < 5) return "now";
  if (seconds < 120) return `${seconds}s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)}m`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)}h`;
  return `${Math.floor(seconds / 86400)}d`;
}
const left = (time) => age(new Date(), Date.parse(time));
const timeTag = (time) => h("time", { datetime: time, title: new Date(time).toLocaleString() }, age(time));
const ago = (time) => h("span", {}, timeTag(time), " ago");

function applySources({ rows, removed }, isNews) {
  for (const { id, head, cells = [], gone = [] } of rows) {
    const known = sources.get(id);
    const source = known ?? { id, head, cells: new Map(), places: new Map() };
    if (head) source.head = head;
    for (const cell of cells) {
      const key = `${cell.namespace}/${cell.name}`;
      const before = source.cells.get(key);
      source.cells.set(key, cell);
      if (isNews && (known ? before?.state !== cell.state || before?.written !== cell.written : true)) {
        flash(id, cell.namespace, toneOf(cell) === "ok" ? "accent" : toneOf(cell));
      }
    }
    for (const key of gone) source.cells.delete(key);
    source.places.clear();
    for (const cell of source.cells.values()) {
      const other = source.places.get(cell.namespace);
      if (!other || SEVERITY.indexOf(toneOf(cell)) > SEVERITY.indexOf(toneOf(other))) source.places.set(cell.namespace, cell);
    }
    sources.set(id, source);
    stale.add(id);
  }
  for (const id of removed) { sources.delete(id); stale.add(id); }
}

function applyEntry(entry, isNews) {
  entries.set(entry.id, { ...entry, isNew: isNews });
  if (entries.size > 400) entries.delete([...entries.values()].reduce((a, b) => (a.time < b.time ? a : b)).id);
  if (!isNews || entry.kind !== "heal" || !entry.source) return;
  const id = `${entry.source.kind}/${entry.source.namespace}/${entry.source.name}`;
  // A heal may be over before the page is told that the companion differed. The Event names the companions.
  const named = new Set(entry.note.match(/[a-z0-9-]+\/[a-z0-9.-]+(?= \()/g) ?? []);
  for (const [key, cell] of sources.get(id)?.cells ?? []) if (named.has(key)) flash(id, cell.namespace, "accent");
}

const stale = new Set(); // sources that have changed since they were drawn
const dirty = new Set();
let drawing = false;
function draw(...parts) {
  parts.forEach((part) => dirty.add(part));
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const parts = new Set(dirty);
    dirty.clear();
    if (parts.has("sources")) { select(); drawHealth(); drawList(); layout(); }
    if (parts.has("cluster")) { drawCluster(); drawHealth(); }
    if (parts.has("activity")) drawActivity();
    if (parts.has("details") || (selected && stale.has(selected.id))) drawDetails();
    if (parts.has("sources") || parts.has("picture")) paint();
    stale.clear();
  });
}

function connect() {
  const stream = new EventSource("api/stream");
  const on = (name, act) => stream.addEventListener(name, (message) => act(JSON.parse(message.data)));
  on("everything", (all) => {
    for (const id of sources.keys()) stale.add(id);
    sources.clear();
    entries.clear();
    applySources(all.sources, false);
    namespaces = all.namespaces;
    cluster = all.cluster;
    all.activity.forEach((entry) => applyEntry(entry, false));
    ready = true;
    readRoute();
    draw("sources", "cluster", "activity", "details");
  });
  on("sources", (change) => { applySources(change, true); draw("sources"); });
  on("namespaces", (all) => { namespaces = all; });
  on("cluster", (now) => { cluster = now; draw("cluster"); });
  on("activity", (entry) => { applyEntry(entry, true); draw("activity", "picture"); });
  stream.onopen = () => setLive("live", "Live");
  stream.onerror = () => {
    if ($("live").dataset.state !== "lost") lostAt = new Date();
    setLive("lost", "Disconnected", `No connection since ${lostAt.toLocaleTimeString()}: is \`lockstep ui\` still running? What you see is from then. Trying again.`);
    // A browser gives up when the answer is an error.
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}
let ready = false;
let lostAt;
let connectionLost = "";
function setLive(state, text, banner = "") {
  $("live").dataset.state = state;
  $("live-text").textContent = text;
  connectionLost = banner;
  drawBanner();
}
function drawBanner() {
  const { held } = cluster;
  const text = connectionLost || (cluster.unreachable ? `The API server does not answer: ${cluster.unreachable}`
    : held ? `Deletes of ${plural(held.companions, "companion")} of ${plural(held.sources, "source")} look like an accident, and are held until ${new Date(held.until).toLocaleString()}. \`lockstep deletes --help\` says what to do.` : "");
  $("banner").hidden = !text;
  if ($("banner").textContent !== text) $("banner").textContent = text;
}

// --- what is shown

let filter = "all", view = "picture", query = "", kind = "all";
let shown = []; // the sources that match, in order
let columns = []; // their namespaces

function select() {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
  const isProblem = (cell) => !["ok", "unseen"].includes(toneOf(cell));
  shown = [];
  const wanted = new Set();
  for (const source of sources.values()) {
    if (filter === "problems" && source.head.healthy) continue;
    const hit = !words.length || matches(`${source.head.namespace}/${source.head.name} ${source.head.kind} ${source.head.message}`);
    const places = [...source.places].filter(([namespace]) => hit || matches(namespace));
    if (!hit && !places.length) continue;
    shown.push(source);
    for (const [namespace, cell] of places) if (filter !== "problems" || isProblem(cell)) wanted.add(namespace);
  }
  shown.sort((a, b) => byName(a.head.namespace, b.head.namespace) || byName(a.head.name, b.head.name) || byName(a.head.kind, b.head.kind));
  columns = [...wanted].sort(byName);
  const empty = $("empty");
  empty.hidden = !ready || shown.length > 0;
  empty.textContent = sources.size === 0
    ? `There are no sources yet. Label a ConfigMap or Secret with ${cluster.domain ?? ""}/managed=true to make it one.`
    : query ? `Nothing matches “${query}”.` : "No problems. Every source has what it asks for.";
  $("picture").hidden = view !== "picture" || shown.length === 0;
  $("list").hidden = view !== "list" || shown.length === 0;
}

function drawHealth() {
  if (!ready) return;
  const all = [...sources.values()];
  const healthy = all.filter((source) => source.head.healthy).length;
  const inStep = all.reduce((sum, source) => sum + source.head.inStep, 0);
  const wanted = all.reduce((sum, source) => sum + source.head.wanted, 0);
  const problems = all.length - healthy;
  const noLeader = cluster.domain && !cluster.leader;
  const text = all.length === 0 ? "No sources" : problems ? `${number.format(healthy)} of ${plural(all.length, "source")} healthy` : `All ${plural(all.length, "source")} healthy`;
  const health = $("health");
  const line = `${text}|${inStep}|${wanted}|${noLeader}`;
  if (health.dataset.line !== line) {
    health.dataset.line = line;
    health.replaceChildren(glyph(problems ? "bad" : noLeader ? "behind" : "ok"), h("strong", {}, text),
      h("span", {}, `${number.format(inStep)} of ${plural(wanted, "companion")} in step`));
  }
  const problemsButton = $("filter").querySelector("[data-filter=problems]");
  problemsButton.classList.toggle("some", problems > 0);
  problemsButton.querySelector("b").textContent = number.format(problems);
  $("filter").querySelector("[data-filter=all] b").textContent = number.format(all.length);
  document.title = problems ? `${plural(problems, "problem")} – Lockstep` : "Lockstep";
}

/** A certificate that expires within so many days should have been replaced. */
function certificateTone(time, days) {
  const left = (Date.parse(time) - Date.now()) / 864e5;
  return left < 0 ? "bad" : left < days ? "behind" : "ok";
}
const CA_DAYS = 14, LEAF_DAYS = 1;

function drawCluster() {
  drawBanner();
  const { replicas = [], denials, heals } = cluster;
  $("domain").textContent = cluster.domain ?? "";
  const readyCount = replicas.filter((replica) => replica.ready).length;
  // A replica is the name of its pod and a random number in the Lease.
  const leader = cluster.leader && (cluster.leadingReplica ?? cluster.leader.replace(/_[0-9a-f]{16}$/, ""));
  const fact = (tone, value, label) => h("li", { "data-tone": tone }, h("b", {}, value), ` ${label}`);
  $("facts").replaceChildren(
    leader ? fact("ok", leader, "leads") : fact("bad", "No leader", ""),
    replicas.length ? fact(readyCount < replicas.length ? "bad" : "ok", `${readyCount}/${replicas.length}`, "replicas ready") : "",
    cluster.caExpires ? fact(certificateTone(cluster.caExpires, CA_DAYS), left(cluster.caExpires), "CA left") : "",
    cluster.version ? fact("ok", cluster.version, "") : "",
  );
  const certificate = (time, days) => h("span", { "data-tone": certificateTone(time, days) },
    Date.parse(time) < Date.now() ? "expired " : "valid for ", h("b", {}, Date.parse(time) < Date.now() ? age(time) + " ago" : left(time)), ` (until ${time.slice(0, 10)})`);
  const rows = [["Leader", leader ?? h("span", { "data-tone": "bad" }, "none holds the Lease")]];
  if (replicas.length) {
    rows.push(["Replicas", h("ul", {}, ...replicas.map((replica) => h("li", { class: "replica", "data-ready": String(replica.ready), title: replica.image },
      h("span", { class: "dot" }), h("span", {}, replica.name + (replica.ready ? "" : " (not ready)")))))]);
  } else rows.push(["Replicas", `no pods in ${cluster.namespace ?? "?"}`]);
  if (cluster.version) rows.push(["Version", cluster.version]);
  rows.push(["CA", cluster.caExpires ? certificate(cluster.caExpires, CA_DAYS) : "the webhooks trust none"]);
  if (cluster.leafExpires) rows.push(["Certificate", certificate(cluster.leafExpires, LEAF_DAYS)]);
  if (heals !== null && heals !== undefined) rows.push(["Heals", `${number.format(heals)} since the replicas started`]);
  if (denials) {
    const list = Object.entries(denials).sort((a, b) => b[1] - a[1]);
    rows.push(["Denials", list.length ? list.map(([reason, count]) => `${reason} ${number.format(count)}`).join(", ") : "none since the replicas started"]);
  }
  $("cluster-body").replaceChildren(
    h("dl", {}, ...rows.flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)])),
    cluster.notes?.length ? h("ul", { class: "notes", "aria-label": "What you should know" }, ...cluster.notes.map((note) => h("li", {}, note))) : "",
  );
}

const MAX_ENTRIES_SHOWN = 100;
function drawActivity() {
  const all = [...entries.values()].filter((entry) => kind === "all" || entry.kind === kind);
  all.sort((a, b) => Date.parse(b.time) - Date.parse(a.time));
  $("entries").replaceChildren(...all.slice(0, MAX_ENTRIES_SHOWN).map((entry) => {
    const item = h("li", { class: entry.isNew ? "new" : "" }, glyph(ENTRY_TONES[entry.kind]),
      h("span", { class: "what" }, entry.kind === "denial" ? `Denied: ${entry.reason}` : entry.reason,
        entry.count > 1 && entry.kind !== "denial" ? ` ×${number.format(entry.count)} ` : " ",
        entry.source ? h("button", { type: "button", onclick: () => go(`${entry.source.kind}/${entry.source.namespace}/${entry.source.name}`) }, `${entry.source.namespace}/${entry.source.name}`) : ""),
      timeTag(entry.time), h("p", { class: "note", title: entry.note }, entry.note));
    entry.isNew = false;
    return item;
  }));
  if (!all.length) $("entries").append(h("li", {}, "", h("span", { class: "note" }, kind === "denial" && !cluster.denials ? "Denials are counted by the replicas, whose metrics cannot be read." : "Nothing has happened yet.")));
}

// --- the list

const items = new Map(); // id → { item, text }
const MAX_ITEMS = 1000;
function drawList() {
  if (view !== "list") return;
  const list = $("list");
  // What needs somebody comes first.
  const ordered = [...shown].sort((a, b) => a.head.healthy - b.head.healthy);
  const wanted = ordered.slice(0, MAX_ITEMS).map((source) => {
    const { head } = source;
    const isCurrent = selected?.id === source.id;
    const text = JSON.stringify(head) + isCurrent;
    let known = items.get(source.id);
    if (known?.text !== text) {
      const tone = SOURCE_TONES[head.state] ?? "behind";
      const share = head.wanted ? (100 * head.inStep) / head.wanted : 0;
      const fill = h("i");
      fill.style.width = `${share}%`;
      const button = h("button", { type: "button", "aria-current": String(isCurrent), onclick: () => go(source.id) },
        glyph(tone), h("span", { class: "name" }, h("i", {}, head.namespace + "/"), head.name, head.kind === "Secret" ? h("span", { class: "kind" }, "Secret") : ""),
        h("span", { class: "bar" + (head.wanted && share < 100 ? " short" : "") }, head.wanted ? fill : ""), h("span", { class: "count" }, `${number.format(head.inStep)}/${number.format(head.wanted)}`),
        h("span", { class: "sub", "data-tone": head.healthy ? "" : tone }, head.message + (head.targets ? ` · ${head.targets}` : "")));
      if (known) known.item.replaceChildren(button);
      known = { item: known?.item ?? h("li", {}, button), text };
      items.set(source.id, known);
    }
    return known.item;
  });
  if (shown.length > MAX_ITEMS) wanted.push(h("li", { class: "notes" }, `${number.format(shown.length - MAX_ITEMS)} more: search for them.`));
  if (list.children.length !== wanted.length || wanted.some((item, n) => list.children[n] !== item)) list.replaceChildren(...wanted);
  for (const id of items.keys()) if (!sources.has(id)) items.delete(id);
}

// --- the picture: sources × namespaces on a canvas. Columns that do not fit continue in another band below, which has
// only the sources with a companion there.

const canvas = $("picture").querySelector("canvas");
const context = canvas.getContext("2d");
const ROW = 24, PAD = 14, MIN_PITCH = 13, MAX_PITCH = 30, MAX_LABEL = 132;
let bands = [], gutter = 0, pitch = MIN_PITCH, labelSize = 11, slant = 0, theme = {};
let hovered, focused; // { id, namespace }

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["panel", "line", "soft", "text", "dim", "accent", "accent-soft", "ok", "behind", "bad", "leaving", "barred", "unseen", "none", "bad-text", "behind-text"];
  theme = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  theme.font = style.getPropertyValue("--font");
}
const font = (size, weight = 400) => { context.font = `${weight} ${size}px ${theme.font}`; };

const widths = new Map();
function width(text, size, weight) {
  const key = `${size}|${weight}|${text}`;
  if (!widths.has(key)) {
    if (widths.size > 20000) widths.clear();
    const before = context.font;
    font(size, weight);
    widths.set(key, context.measureText(text).width);
    context.font = before;
  }
  return widths.get(key);
}
function fit(text, room, size, weight) {
  if (width(text, size, weight) <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (width(text.slice(0, middle) + "…", size, weight) <= room) low = middle; else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}

/** The ones with the longest texts: to measure all of them would take too long. */
const longestOf = (all, text) => [...all].sort((a, b) => text(b).length - text(a).length).slice(0, 20);

const countText = ({ head }) => (head.wanted || head.healthy ? `${head.inStep}/${head.wanted}` : "–");

function layout() {
  const box = $("picture");
  if (box.hidden || !box.clientWidth) { bands = []; return; }
  const labels = longestOf(shown, ({ head }) => `${head.namespace}/${head.name}`).map(({ head }) => width(`${head.namespace}/`, 12) + width(head.name, 12, 550));
  const counts = Math.max(30, ...longestOf(shown, countText).map((source) => width(countText(source), 11)));
  gutter = Math.min(Math.max(120, ...labels) + counts + 58, box.clientWidth * 0.42, 420);
  const longest = Math.max(40, ...longestOf(columns, (name) => name).map((name) => Math.min(width(name, 11), MAX_LABEL)));
  const roomAt = (slant) => Math.max(MIN_PITCH, box.clientWidth - gutter - PAD - Math.cos(slant) * longest - 4);
  // Narrow columns have steep labels, or these would overlap.
  slant = columns.length * 17 <= roomAt(Math.PI / 3) ? Math.PI / 3 : Math.PI / 2.35;
  const room = roomAt(slant);
  const count = Math.max(1, Math.ceil(columns.length / Math.max(1, Math.floor(room / MIN_PITCH))));
  const each = Math.max(1, Math.ceil(columns.length / count));
  pitch = Math.max(MIN_PITCH, Math.min(MAX_PITCH, Math.floor(room / each)));
  labelSize = pitch < 16 ? 10 : 11;
  bands = [];
  let top = 0;
  for (let n = 0; n < count; n++) {
    const names = columns.slice(n * each, (n + 1) * each);
    const inBand = new Set(names);
    const rows = count === 1 ? shown : shown.filter((source) => (n === 0 && !source.places.size) || [...source.places.keys()].some((name) => inBand.has(name)));
    if (!rows.length) continue;
    bands.push({ names, rows, top: 0, head: 0, height: 0 });
  }
  // A few sources in a thousand namespaces: the labels of the columns would hide the picture.
  const brief = bands.length > 2 && bands.every((band) => band.rows.length <= 3);
  for (const band of bands) {
    const labels = longestOf(band.names, (name) => name).map((name) => Math.min(width(name, labelSize), MAX_LABEL));
    band.brief = brief;
    band.head = brief ? 20 : band.names.length ? Math.sin(slant) * Math.max(...labels) + 22 : 12;
    band.top = top;
    band.height = band.head + band.rows.length * ROW + (brief ? 4 : 16);
    top += band.height;
  }
  $("spacer").style.height = `${top}px`;
}

/** The header of a band stays in sight while its rows are. */
function headAt(band) {
  const top = band.top - $("picture").scrollTop;
  return Math.min(Math.max(top, 0), top + band.height - band.head - ROW);
}

function cellAt(x, y) {
  const at = y + $("picture").scrollTop;
  const band = bands.find((band) => at >= band.top && at < band.top + band.height);
  if (!band || y < headAt(band) + band.head) return undefined;
  const row = band.rows[Math.floor((at - band.top - band.head) / ROW)];
  const column = x < gutter ? -1 : Math.floor((x - gutter) / pitch);
  return row && { id: row.id, namespace: band.names[column] };
}

const flashes = new Map(); // id|namespace → { start, tone }
const calm = matchMedia("(prefers-reduced-motion: reduce)");
function flash(id, namespace, tone) {
  flashes.set(`${id}|${namespace}`, { start: performance.now(), tone });
  if (flashes.size > 2000) flashes.delete(flashes.keys().next().value);
  draw("picture");
}

/** Colour and shape of a state, around this centre. */
function mark(tone, x, y, size) {
  const r = size / 2;
  context.fillStyle = context.strokeStyle = theme[tone] ?? theme.barred;
  context.beginPath();
  if (tone === "ok") {
    context.roundRect(x - r, y - r, size, size, 3);
    context.fill();
  } else if (tone === "behind") {
    context.moveTo(x, y - r); context.lineTo(x + r, y + r); context.lineTo(x - r, y + r);
    context.fill();
  } else if (tone === "bad") {
    const s = r * 0.85;
    context.lineWidth = 3.2; context.lineCap = "round";
    context.moveTo(x - s, y - s); context.lineTo(x + s, y + s); context.moveTo(x + s, y - s); context.lineTo(x - s, y + s);
    context.stroke();
  } else if (tone === "leaving") {
    context.lineWidth = 1.8; context.setLineDash([3, 2]);
    context.roundRect(x - r + 1, y - r + 1, size - 2, size - 2, 3);
    context.stroke();
    context.setLineDash([]);
  } else if (tone === "barred") {
    context.lineWidth = 1.8;
    context.arc(x, y, r - 1.5, 0, 2 * Math.PI);
    context.stroke();
  } else {
    context.lineWidth = 1.4;
    for (const d of [-0.5, 0, 0.5]) { context.moveTo(x - r, y + r + d * size - r); context.lineTo(x + r, y - r + d * size - r + r); }
    context.stroke();
  }
}

function paint() {
  const box = $("picture");
  if (box.hidden || !box.clientWidth) return;
  const ratio = devicePixelRatio || 1, w = box.clientWidth, hgt = box.clientHeight;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(hgt * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(hgt * ratio);
    canvas.style.width = `${w}px`;
    canvas.style.height = `${hgt}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = theme.panel;
  context.fillRect(0, 0, w, hgt);
  const now = performance.now(), scroll = box.scrollTop;
  const shownAt = hovered ?? (document.activeElement === box ? focused : undefined);
  for (const band of bands) {
    const top = band.top - scroll;
    if (top > hgt || top + band.height < 0) continue;
    paintRows(band, top, w, hgt, now, shownAt);
    paintHead(band, headAt(band), w, shownAt);
  }
  for (const [key, { start }] of flashes) if (now - start > 2600) flashes.delete(key);
  if (flashes.size) setTimeout(() => draw("picture"), calm.matches ? 500 : 16);
}

function paintRows(band, top, w, hgt, now, shownAt) {
  const from = Math.max(0, Math.floor((-top - band.head) / ROW));
  const to = Math.min(band.rows.length, Math.ceil((hgt - top - band.head) / ROW));
  const right = gutter + band.names.length * pitch;
  const column = shownAt?.namespace ? band.names.indexOf(shownAt.namespace) : -1;
  if (column >= 0) {
    context.fillStyle = theme.soft;
    context.fillRect(gutter + column * pitch, top + band.head + from * ROW, pitch, (to - from) * ROW);
  }
  const size = Math.min(14, pitch - 3);
  context.textBaseline = "middle";
  for (let n = from; n < to; n++) {
    const source = band.rows[n], { head } = source;
    const y = top + band.head + n * ROW, middle = y + ROW / 2;
    if (shownAt?.id === source.id || selected?.id === source.id) {
      context.fillStyle = selected?.id === source.id ? theme["accent-soft"] : theme.soft;
      context.fillRect(0, y, Math.max(right, gutter) + 4, ROW);
    }
    if (n > 0 && band.rows[n - 1].head.namespace !== head.namespace) {
      context.fillStyle = theme.soft;
      context.fillRect(PAD, y, Math.max(right, gutter) - PAD, 1);
    }
    const tone = SOURCE_TONES[head.state] ?? "behind";
    const count = countText(source), countWidth = width(count, 11);
    if (!head.healthy) mark(tone === "paused" ? "barred" : tone, PAD + 5, middle, 9);
    const nameAt = PAD + 17, room = gutter - nameAt - countWidth - 24;
    // Where both do not fit, the name is worth more.
    const prefixRoom = room - width(head.name, 12, 550);
    const prefix = prefixRoom < 30 ? "" : fit(`${head.namespace}/`, prefixRoom, 12);
    context.textAlign = "left";
    font(12);
    context.fillStyle = theme.dim;
    context.fillText(prefix, nameAt, middle);
    const at = nameAt + width(prefix, 12);
    const name = fit(head.name, gutter - at - countWidth - 24, 12, 550);
    font(12, 550);
    context.fillStyle = theme.text;
    context.fillText(name, at, middle);
    font(11);
    context.textAlign = "right";
    context.fillStyle = head.healthy ? theme.dim : tone === "bad" ? theme["bad-text"] : theme["behind-text"];
    context.fillText(count, gutter - 12, middle);
    for (let c = 0; c < band.names.length; c++) {
      const cell = source.places.get(band.names[c]);
      const x = gutter + c * pitch + pitch / 2;
      if (!cell) {
        context.fillStyle = theme.none;
        context.fillRect(x - 1, middle - 1, 2, 2);
        continue;
      }
      const lit = flashes.get(`${source.id}|${band.names[c]}`);
      if (lit) paintFlash(lit, x, middle, size, now);
      mark(toneOf(cell), x, middle, size);
    }
    if (!band.names.length || (!source.places.size && !head.healthy)) {
      font(12);
      context.textAlign = "left";
      context.fillStyle = theme.dim;
      context.fillText(fit(head.message, w - gutter - PAD * 2, 12), gutter + 6, middle);
    }
    for (const [place, style] of [[shownAt, theme.text], [selected, theme.accent]]) {
      const c = place?.id === source.id && place.namespace ? band.names.indexOf(place.namespace) : -1;
      if (c < 0) continue;
      context.strokeStyle = style;
      context.lineWidth = 2;
      context.beginPath();
      context.roundRect(gutter + c * pitch + pitch / 2 - size / 2 - 3, middle - size / 2 - 3, size + 6, size + 6, 5);
      context.stroke();
    }
  }
}

function paintFlash({ start, tone }, x, y, size, now) {
  const t = Math.min(1, (now - start) / 2400);
  context.globalAlpha = calm.matches ? 0.5 : (1 - t) * 0.55;
  context.fillStyle = theme[tone] ?? theme.accent;
  context.beginPath();
  const r = size / 2 + 3 + (calm.matches ? 2 : Math.min(1, t * 3) * 5);
  context.roundRect(x - r, y - r, 2 * r, 2 * r, 5);
  context.fill();
  context.globalAlpha = 1;
}

function paintHead(band, y, w, shownAt) {
  context.fillStyle = theme.panel;
  context.fillRect(0, y, w, band.head);
  context.textAlign = "left";
  context.textBaseline = "middle";
  if (band.brief) {
    const right = gutter + band.names.length * pitch, shownHere = band.names.indexOf(shownAt?.namespace);
    font(labelSize, shownHere >= 0 ? 650 : 400);
    context.fillStyle = shownHere >= 0 ? theme.text : theme.dim;
    const range = shownHere >= 0 ? shownAt.namespace : `${band.names[0]} – ${band.names.at(-1)}`;
    context.fillText(fit(range, right - gutter, labelSize, 650), gutter + 2, y + band.head - 8);
    return;
  }
  band.names.forEach((name, c) => {
    const isShown = shownAt?.namespace === name;
    context.save();
    context.translate(gutter + c * pitch + pitch / 2, y + band.head - 8);
    context.rotate(-slant);
    font(labelSize, isShown ? 650 : 400);
    context.fillStyle = isShown ? theme.text : theme.dim;
    context.fillText(fit(name, MAX_LABEL, labelSize, isShown ? 650 : 400), 2, 0);
    context.restore();
  });
  if (band.names.length) {
    font(11);
    context.fillStyle = theme.dim;
    context.textAlign = "left";
    const several = bands.length > 1;
    context.fillText(several ? `${plural(band.rows.length, "source")} × ${plural(band.names.length, "namespace")}` : `${plural(shown.length, "source")} × ${plural(columns.length, "namespace")}`, PAD, y + band.head - 12);
  }
  context.fillStyle = theme.line;
  context.fillRect(PAD, y + band.head - 1, w - 2 * PAD, 1);
}

function describe({ id, namespace }) {
  const source = sources.get(id);
  if (!source) return ["", ""];
  const name = `${source.head.namespace}/${source.head.name}`;
  if (!namespace) return [name, `${source.head.message}, ${number.format(source.head.inStep)} of ${number.format(source.head.wanted)} in step`];
  const cell = source.places.get(namespace);
  const text = cell ? cell.message + (cell.written ? `, written ${age(cell.written)}${age(cell.written) === "now" ? "" : " ago"}` : "") : "no companion here: Enter or a click says why";
  return [`${name} → ${namespace}`, text];
}

function hover(place, x, y) {
  const same = place?.id === hovered?.id && place?.namespace === hovered?.namespace;
  hovered = place;
  const tip = $("tip");
  tip.hidden = !place;
  if (place) {
    const [title, text] = describe(place);
    if (!same) tip.replaceChildren(h("b", {}, title), text);
    const box = $("sources").getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 14, box.width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > box.height ? y - tip.offsetHeight - 10 : y + 18}px`;
  }
  if (!same) draw("picture");
}

/** Moves the keyboard's place by columns and rows. */
function move(dx, dy) {
  if (!bands.length) return;
  let b = bands.findIndex((band) => (focused?.namespace ? band.names.includes(focused.namespace) : true) && band.rows.some((source) => source.id === focused?.id));
  let r, c;
  if (b < 0) [b, r, c] = [0, 0, 0];
  else {
    r = bands[b].rows.findIndex((source) => source.id === focused.id) + dy;
    c = (focused.namespace ? bands[b].names.indexOf(focused.namespace) : 0) + dx;
  }
  const beside = (next, row) => { if (bands[next]) { b = next; r = row; return true; } return false; };
  if (r < 0) { if (!beside(b - 1, (bands[b - 1]?.rows.length ?? 0) - 1)) r = 0; }
  else if (r >= bands[b].rows.length) { if (!beside(b + 1, 0)) r = bands[b].rows.length - 1; }
  const sameRow = (next) => Math.max(0, bands[next]?.rows.findIndex((source) => source.id === focused?.id) ?? 0);
  if (c < 0) { if (beside(b - 1, sameRow(b - 1))) c = bands[b].names.length - 1; else c = 0; }
  else if (c >= bands[b].names.length) { if (dx > 0 && beside(b + 1, sameRow(b + 1))) c = 0; else c = Math.max(0, bands[b].names.length - 1); }
  const band = bands[b];
  focused = { id: band.rows[r].id, namespace: band.names[c] };
  hovered = undefined;
  $("tip").hidden = true;
  const box = $("picture"), y = band.top + band.head + r * ROW;
  if (y - band.head < box.scrollTop) box.scrollTop = y - band.head;
  if (y + ROW * 2 > box.scrollTop + box.clientHeight) box.scrollTop = y + ROW * 2 - box.clientHeight;
  $("announce").textContent = describe(focused).join(": ");
  draw("picture");
}

$("picture").addEventListener("keydown", (event) => {
  const page = Math.max(1, Math.floor($("picture").clientHeight / ROW) - 6);
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [0, -page], PageDown: [0, page], Home: [-1e9, 0], End: [1e9, 0] };
  if (steps[event.key]) { event.preventDefault(); move(...steps[event.key]); }
  if ((event.key === "Enter" || event.key === " ") && focused) { event.preventDefault(); go(focused.id, focused.namespace); }
});
$("picture").addEventListener("focus", () => { if (!focused) move(0, 0); draw("picture"); });
$("picture").addEventListener("blur", () => draw("picture"));
$("picture").addEventListener("scroll", () => { hover(); draw("picture"); }, { passive: true });
canvas.addEventListener("mousemove", (event) => hover(cellAt(event.offsetX, event.offsetY), event.offsetX, event.offsetY));
canvas.addEventListener("mouseleave", () => hover());
canvas.addEventListener("click", (event) => {
  const place = cellAt(event.offsetX, event.offsetY);
  if (place) { focused = place; go(place.id, place.namespace); }
});

// --- details

let selected; // { id, namespace }
let explained = {}; // { key, answer }

/** The address of the page says what is selected, so that Back closes it. */
function go(id, namespace) {
  const route = id ? `#/${[...id.split("/"), ...(namespace ? [namespace] : [])].map(encodeURIComponent).join("/")}` : "#";
  if (route !== location.hash && !(route === "#" && !location.hash)) history.pushState(null, "", route);
  readRoute();
  if (id) $("details").focus({ preventScroll: false });
}
function readRoute() {
  const [kind, namespace, name, place] = location.hash.slice(2).split("/").map(decodeURIComponent);
  selected = name ? { id: `${kind}/${namespace}/${name}`, namespace: place } : undefined;
  draw("details", "sources");
}
addEventListener("popstate", readRoute);
addEventListener("hashchange", readRoute);

function close() {
  const back = selected;
  go();
  if (back && view === "picture") $("picture").focus();
}

function command(text) {
  const button = h("button", { type: "button", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return h("div", { class: "command" }, h("code", {}, text), button);
}

async function explain(id, namespace) {
  const key = `${id}|${namespace}`, source = sources.get(id);
  const version = JSON.stringify([source?.head.state, source?.places.get(namespace), namespaces.includes(namespace)]);
  if (explained.key === key && explained.version === version) return;
  explained = { key, version, answer: explained.key === key ? explained.answer : undefined };
  try {
    const response = await fetch(`api/explain/${[...id.split("/"), namespace].map(encodeURIComponent).join("/")}`);
    const answer = response.ok ? await response.json() : { steps: [{ met: "unknown", text: (await response.text()).trim() }] };
    if (explained.key === key) { explained.answer = answer; draw("details"); }
  } catch {
    if (explained.key === key) explained.version = undefined;
  }
}

function drawDetails() {
  const panel = $("details"), scroll = panel.scrollTop;
  const source = selected && sources.get(selected.id);
  panel.hidden = !selected;
  if (!selected) return panel.replaceChildren();
  const closeButton = h("button", { class: "close", type: "button", "aria-label": "Close details", onclick: close }, "×");
  if (!source) {
    return panel.replaceChildren(h("header", {}, h("div", {}, h("p", { class: "title" }, selected.id), h("p", { class: "state" }, ready ? "This source is gone, and so are its companions." : "")), closeButton));
  }
  const typed = panel.querySelector("input")?.value ?? "";
  const hadFocus = panel.contains(document.activeElement) && document.activeElement.tagName === "INPUT";
  panel.replaceChildren(...(selected.namespace ? placeDetails(source, selected.namespace, closeButton) : sourceDetails(source, closeButton)));
  panel.scrollTop = scroll;
  const input = panel.querySelector("input");
  if (input) { input.value = typed; if (hadFocus) input.focus(); }
}

const MAX_PLACES = 500;
const resource = (head) => head.kind.toLowerCase();

function placeDetails(source, namespace, closeButton) {
  const { head } = source, cell = source.places.get(namespace);
  explain(source.id, namespace);
  const answer = explained.key === `${source.id}|${namespace}` ? explained.answer : undefined;
  const kubectl = cluster.kubectl || "kubectl";
  const look = cell && !["missing", "no-namespace", "not-seen"].includes(cell.state)
    ? `${kubectl} -n ${namespace} describe ${resource(head)} ${cell.name}` : `${kubectl} -n ${head.namespace} describe ${resource(head)} ${head.name}`;
  return [
    h("header", {}, h("div", {}, h("p", { class: "title" }, h("i", {}, `${namespace}/`), cell?.name ?? "–"),
      h("p", {}, "of ", h("button", { class: "link", type: "button", onclick: () => go(source.id) }, `${head.namespace}/${head.name}`), ` (${head.kind})`)), closeButton),
    h("p", { class: "state" }, glyph(cell ? toneOf(cell) : "none"), h("span", {}, cell ? cell.message : "there is no companion here"),
      cell?.written ? h("span", { class: "written" }, "written ", ago(cell.written)) : ""),
    h("h3", {}, cell?.state === "in-step" ? "Why it is here" : "Why not here?"),
    h("ul", { class: "steps" }, ...(answer?.steps ?? []).map((step) => h("li", { "data-met": step.met }, h("b", { "aria-label": { yes: "met", no: "not met", unknown: "not known" }[step.met] }, { yes: "✓", no: "✗", unknown: "?" }[step.met]), h("span", {}, step.text)))),
    ...(answer?.commands?.length ? [h("h3", {}, "To change that"), ...answer.commands.map(command)] : []),
    h("h3", {}, "To look at it"), command(look),
  ];
}

function sourceDetails(source, closeButton) {
  const { head } = source, kubectl = cluster.kubectl || "kubectl";
  const places = [...source.cells.values()].sort((a, b) => SEVERITY.indexOf(toneOf(b)) - SEVERITY.indexOf(toneOf(a)) || byName(a.namespace, b.namespace));
  const input = h("input", { list: "all-namespaces", placeholder: "a namespace", "aria-label": "A namespace", autocomplete: "off", spellcheck: "false" });
  const ask = h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); if (input.value.trim()) go(source.id, input.value.trim()); } },
    input, h("button", { type: "submit" }, "Why?"), h("datalist", { id: "all-namespaces" }, ...namespaces.slice(0, 2000).map((name) => h("option", { value: name }))));
  return [
    h("header", {}, h("div", {}, h("p", { class: "title" }, h("i", {}, `${head.namespace}/`), head.name), h("p", {}, head.kind)), closeButton),
    h("p", { class: "state" }, glyph(SOURCE_TONES[head.state] ?? "behind"), h("strong", {}, head.message)),
    ...head.troubles.filter((trouble) => trouble.message !== head.message).slice(0, 20).map((trouble) => h("p", { class: "trouble" }, `${trouble.reason}: ${trouble.message}`)),
    h("dl", {}, h("dt", {}, "Targets"), h("dd", { class: "mono" }, head.targets.replaceAll(",", ", ") || "–"), h("dt", {}, "In step"), h("dd", {}, `${number.format(head.inStep)} of ${number.format(head.wanted)}${head.notSeen ? `, ${number.format(head.notSeen)} not seen` : ""}`),
      ...(head.changed ? [h("dt", {}, "Changed"), h("dd", {}, ago(head.changed))] : [])),
    h("h3", {}, "Why here, or why not?"), ask,
    h("h3", {}, "To look at it"), command(`${kubectl} -n ${head.namespace} describe ${resource(head)} ${head.name}`),
    command(`${kubectl} -n ${head.namespace} events --for ${resource(head)}/${head.name}`),
    h("h3", {}, plural(places.length, "companion")),
    h("ul", { class: "places" }, ...places.slice(0, MAX_PLACES).map((cell) => h("li", {},
      h("button", { type: "button", onclick: () => go(source.id, cell.namespace) }, glyph(toneOf(cell)), h("span", {}, cell.namespace),
        h("span", {}, toneOf(cell) === "ok" ? (cell.written ? timeTag(cell.written) : "") : cell.state.replaceAll("-", " ")))))),
    places.length > MAX_PLACES ? h("p", { class: "sub" }, `${number.format(places.length - MAX_PLACES)} more: ask for them above.`) : "",
  ];
}

// --- controls

function press(group, attribute, value) {
  for (const button of $(group).querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset[attribute] === value));
}
$("filter").addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button) { filter = button.dataset.filter; press("filter", "filter", filter); draw("sources"); }
});
function setView(next) { view = next; press("view", "view", view); draw("sources"); }
$("view").addEventListener("click", ({ target }) => { const button = target.closest("button"); if (button) setView(button.dataset.view); });
$("kinds").addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button) { kind = button.dataset.kind; press("kinds", "kind", kind); draw("activity"); }
});
$("tabs").addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  document.body.dataset.tab = button.dataset.tab;
  for (const other of $("tabs").children) other.setAttribute("aria-current", String(other === button));
});
$("search").addEventListener("input", ({ target }) => { query = target.value; $("picture").scrollTop = 0; draw("sources"); });
addEventListener("keydown", (event) => {
  const typing = ["INPUT", "TEXTAREA"].includes(document.activeElement?.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); $("search").focus(); }
  if (event.key === "Escape") {
    if (document.activeElement === $("search") && query) { $("search").value = query = ""; draw("sources"); } else if (selected) close();
  }
});

for (const [tone, text] of LEGEND) $("legend").append(h("li", {}, glyph(tone), text));
const phone = matchMedia("(max-width: 760px)");
const byWidth = () => setView(phone.matches ? "list" : "picture");
phone.addEventListener("change", byWidth);
for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
  matchMedia(query).addEventListener("change", () => { readTheme(); draw("picture"); });
}
new ResizeObserver(() => draw("sources")).observe($("sources"));
setInterval(() => {
  for (const element of document.querySelectorAll("time[datetime]")) element.textContent = age(element.getAttribute("datetime"));
}, 5000);
readTheme();
byWidth();
connect();
