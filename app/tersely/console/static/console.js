// Two elements, the context strip and the live view; keyboard, charts, rows that come and go, and files that are dropped.
// Text from messages is only ever text.
"use strict";

// Bars and slider choose a call; the page follows a click, or the slider when it is let go.
class ContextStrip extends HTMLElement {
  connectedCallback() {
    const input = this.querySelector("input[type=range]");
    const output = this.querySelector("output");
    input.addEventListener("input", () => {
      const text = `call ${input.value} of ${input.max}`;
      output.textContent = text;
      input.setAttribute("aria-valuetext", text);
    });
    input.addEventListener("change", () => this.choose(input.value));
    this.addEventListener("click", (event) => {
      const bar = event.target.closest("[data-call]");
      if (bar) this.choose(bar.dataset.call);
    });
  }

  choose(call) {
    const target = new URL(this.dataset.link, location.origin);
    target.searchParams.set("call", call);
    location.assign(target);
  }
}

function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  return String(Math.round(value));
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function anchor(link, text) {
  const made = element("a", text);
  if (link.startsWith("/console/")) made.setAttribute("href", link);
  return made;
}

// Calls as they run. The browser connects again by itself; the page says so meanwhile.
class LiveView extends HTMLElement {
  connectedCallback() {
    const status = this.querySelector("[data-status]");
    this.source = new EventSource(this.dataset.source);
    this.source.onopen = () => { status.textContent = "connected"; };
    this.source.onerror = () => {
      status.textContent = "connecting again…";
      // After an answer that is no stream (503, a proxy's 502) the browser gives up.
      if (this.source.readyState === EventSource.CLOSED) this.later = setTimeout(() => this.connectedCallback(), 3000);
    };
    this.source.addEventListener("happening", (event) => this.add(JSON.parse(event.data)));
    this.source.addEventListener("running", (event) => this.show(JSON.parse(event.data)));
  }

  disconnectedCallback() { clearTimeout(this.later); this.source.close(); }

  show({ calls, notes }) {
    const list = this.querySelector("[data-running]");
    const noted = this.querySelector("[data-notes]");
    noted.replaceChildren(...notes.map((note) => {
      const item = element("li");
      const at = element("span", note.at.slice(0, 19).replace("T", " "), "note");
      if (note.link) at.append(" · ", anchor(note.link, "its session"));
      item.append(element("span", note.kind, `state s-${note.kind}`), " ", note.text, " ", at);
      return item;
    }));
    this.querySelector("[data-quiet]").hidden = notes.length > 0;
    list.replaceChildren(...calls.map((call) => {
      const item = element("li");
      const words = [call.call ? `call ${call.call}` : "", call.client, call.since.slice(11, 19)].filter(Boolean).join(" · ");
      item.append(element("span", call.state, `state s-${call.state.replace(" ", "-")}`), " ", call.link ? anchor(call.link, call.title) : call.title, " ", element("span", words, "note"));
      return item;
    }));
    this.querySelector("[data-none]").hidden = calls.length > 0;
  }

  add(told) {
    const row = element("tr", undefined, "fresh");
    row.dataset.row = "";
    const head = element("th");
    head.scope = "row";
    head.append(anchor(told.link, told.session.slice(0, 18)));
    const isCall = told.kind === "call";
    const failed = isCall && (told.status === null || told.status >= 400);
    const what = isCall ? `call ${told.number}${failed ? `: ${told.status ?? "no answer"}` : ""}` : `${told.kind.replaceAll("_", " ")}${told.reason ? `: ${told.reason}` : ""}`;
    const cells = [
      element("td", told.at.slice(0, 19).replace("T", " ")), head, element("td", told.client || "–"),
      element("td", told.model || "–"), element("td", what, failed ? "loss" : ""),
      element("td", isCall ? `${short(told.after)} of ${short(told.before)}` : "–", "n"),
      element("td", told.hit === null || told.hit === undefined ? "–" : `${Math.round(100 * told.hit)} %`, "n"),
      element("td", told.seconds === null || told.seconds === undefined ? "–" : told.seconds < 1 ? `${Math.round(1000 * told.seconds)} ms` : `${told.seconds.toFixed(1)} s`, "n"),
      element("td", told.overhead === null || told.overhead === undefined ? "–" : `${told.overhead.toFixed(1)} ms`, "n"),
    ];
    row.append(...cells);
    const body = this.querySelector("[data-latest]");
    body.prepend(row);
    this.querySelector("[data-waiting]").hidden = true;
    while (body.children.length > 100) body.lastElementChild.remove();
  }
}

// Cost by day or by call as lines; where no model has a price, tokens.
function drawChart(box) {
  const points = JSON.parse(box.dataset.chart);
  const byCall = box.dataset.by === "call";
  if (points.length < 2 || !window.uPlot) { box.hidden = true; return; }
  const priced = points.some((point) => point[1] !== null);
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const write = (value) => (value === null || value === undefined ? "–" : priced ? `$${value.toFixed(value < 1 ? 4 : 2)}` : short(value));
  const data = [
    points.map((point) => (byCall ? point[0] : Date.parse(`${point[0]}T00:00:00Z`) / 1000)),
    points.map((point) => (priced ? point[1] : point[4])),
    points.map((point) => (priced ? point[2] : point[3])),
  ];
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
  const options = {
    width: box.clientWidth, height: 220, tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "UTC"),
    series: [
      { label: byCall ? "Call" : "Day" },
      { label: "as sent", stroke: color("--tail"), width: 2, value: (_, value) => write(value) },
      { label: "full history", stroke: color("--soft"), width: 1.5, dash: [4, 4], value: (_, value) => write(value) },
    ],
    scales: { x: { time: !byCall } },
    axes: [axis, { ...axis, size: 70, values: (_, values) => values.map(write) }],
  };
  const plot = new uPlot(options, data, box);
  addEventListener("resize", () => plot.setSize({ width: box.clientWidth, height: 220 }));
}

// Rows far outside the window are put away: a gap of their height stands for them, and loads them again.
const FAR = 8;
const farAway = new IntersectionObserver((entries) => {
  for (const entry of entries) if (!entry.isIntersecting && entry.target.isConnected) putAway(entry.target);
}, { rootMargin: `${100 * FAR}% 0px` });

function putAway(chunk) {
  const height = chunk.getBoundingClientRect().height;
  const rows = chunk.querySelectorAll(".row").length;
  if (!height || !rows || chunk.contains(document.activeElement)) return;
  farAway.unobserve(chunk);
  const gap = element("div", `${rows} messages`, "gap");
  gap.setAttribute("role", "listitem");
  gap.setAttribute("hx-get", chunk.dataset.rows);
  gap.setAttribute("hx-trigger", "intersect once");
  gap.setAttribute("hx-swap", "outerHTML");
  gap.style.minHeight = gap.style.height = `${height}px`;
  chunk.replaceWith(gap);
  htmx.process(gap);
}

htmx.onLoad((loaded) => {
  const chunks = loaded.matches(".chunk") ? [loaded] : loaded.querySelectorAll(".chunk");
  for (const chunk of chunks) farAway.observe(chunk);
});

// Subagents of a session, shown under it and put away again.
document.addEventListener("click", (event) => {
  const chip = event.target.closest("[data-fold]");
  if (!chip || chip.getAttribute("aria-expanded") === null) return;
  event.preventDefault();
  const open = chip.getAttribute("aria-expanded") === "true";
  chip.setAttribute("aria-expanded", String(!open));
  const rows = [...document.querySelectorAll("tr[data-parent]")].filter((row) => row.dataset.parent === chip.dataset.fold);
  if (rows.length) rows.forEach((row) => { row.hidden = open; });
  else if (!open) htmx.ajax("GET", chip.dataset.rows, { target: chip.closest("tr"), swap: "afterend" });
});

// A file is dropped or chosen, and played; the page goes where it can be looked at.
function acceptFiles(form) {
  const input = form.elements.file;
  form.addEventListener("dragover", (event) => { event.preventDefault(); form.classList.add("over"); });
  form.addEventListener("dragleave", () => form.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("over");
    if (event.dataTransfer.files.length) input.files = event.dataTransfer.files;
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); if (input.files[0]) playFile(form, input.files[0]); });
}

async function playFile(form, file) {
  const status = form.querySelector("[data-status]");
  const button = form.querySelector("button");
  status.textContent = "playing…";
  status.className = "status";
  button.disabled = true;
  const target = new URL(form.dataset.play, location.origin);
  target.searchParams.set("name", file.name);
  for (const name of ["strategy", "epoch", "model"]) target.searchParams.set(name, form.elements[name].value);
  let answer;
  try {
    const response = await fetch(target, { method: "POST", body: file, headers: { "x-console-token": form.dataset.token, "content-type": "application/octet-stream" } });
    answer = await response.json();
  } catch { answer = { trouble: "the service did not answer: is it still running?" }; }
  button.disabled = false;
  if (answer.go && answer.go.startsWith("/console/")) location.assign(answer.go);
  else { status.textContent = answer.trouble || "that did not work"; status.className = "status loss"; }
}

// An operation of the API is sent as its form says; the answer is shown as it comes.
const MAX_ANSWER = 200000;
async function tryOperation(form) {
  const status = form.querySelector("[data-status]");
  const shown = form.querySelector("[data-answer]");
  const headers = new Headers();
  const query = new URLSearchParams();
  let path = form.dataset.try;
  for (const field of form.querySelectorAll("[data-in]")) {
    if (field.dataset.in === "path") path = path.replace(`{${field.name}}`, encodeURIComponent(field.value));
    else if (!field.value) continue;
    else if (field.dataset.in === "query") query.append(field.name, field.value);
    else headers.set(field.name, field.value);
  }
  const key = form.querySelector("[data-key]").value;
  if (key) headers.set("x-tersely-key", key);
  const text = form.querySelector("[data-body]");
  const file = form.querySelector("[data-file]");
  if (text) headers.set("content-type", "application/json");
  status.textContent = "sending…";
  shown.hidden = false;
  shown.textContent = "";
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), 60000);
  const began = performance.now();
  try {
    const response = await fetch(query.size ? `${path}?${query}` : path, { method: form.dataset.method, headers, body: text ? text.value : file ? file.files[0] : undefined, signal: stop.signal });
    status.textContent = `${response.status} ${response.statusText} after ${Math.round(performance.now() - began)} ms`;
    const reader = response.body ? response.body.pipeThrough(new TextDecoderStream()).getReader() : null;
    let answer = "";
    while (reader && answer.length < MAX_ANSWER) {
      const { done, value } = await reader.read();
      if (done) break;
      answer += value;
      shown.textContent = answer.slice(0, MAX_ANSWER);
    }
    if (reader && answer.length >= MAX_ANSWER) { await reader.cancel(); status.textContent += "; only the beginning is shown"; }
    try { shown.textContent = JSON.stringify(JSON.parse(answer), null, 2); } catch { /* no JSON: as it came */ }
    shown.hidden = !answer;
  } catch (error) {
    status.textContent = stop.signal.aborted ? "stopped after a minute" : `nothing came back: ${error.message}`;
  }
  clearTimeout(timer);
}

customElements.define("context-strip", ContextStrip);
customElements.define("live-view", LiveView);

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-open]");
  if (opener) document.getElementById(opener.dataset.open).showModal();
});

// A choice that changes what can be asked: the form is sent, and comes back with the right fields.
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

let current = -1;
function move(step) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const focused = rows.indexOf(document.activeElement.closest("[data-row]"));
  current = Math.min(rows.length - 1, Math.max(0, (focused >= 0 ? focused : current) + step));
  const row = rows[current];
  const target = row.matches("[tabindex]") ? row : row.querySelector("a") || row;
  target.focus({ preventScroll: true });
  row.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "/") {
    const field = document.querySelector("[data-slash]");
    if (field) field.focus();
    else location.assign("/console/search");
    event.preventDefault();
  } else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "[" || event.key === "]") document.querySelector(`[data-key="${event.key}"]`)?.click();
});

addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("[data-chart]").forEach(drawChart);
  document.querySelectorAll("form[data-play]").forEach(acceptFiles);
  for (const form of document.querySelectorAll("form[data-try]")) form.addEventListener("submit", (event) => { event.preventDefault(); tryOperation(form); });
  const follows = document.querySelector("[data-reload]");
  if (follows) setTimeout(() => location.reload(), 1000 * follows.dataset.reload);
  const target = document.querySelector(".row.target");
  if (target) { target.scrollIntoView({ block: "center" }); target.focus({ preventScroll: true }); }
});
