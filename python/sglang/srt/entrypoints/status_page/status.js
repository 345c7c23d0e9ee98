"use strict";
// Reads the server's own routes only. The key, if the server wants one, stays in this page.

const byId = (id) => document.getElementById(id);
const POLL_MS = 1000, KEPT = 120;
let key = "";

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, value = count;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

// --- model and memory plan ---------------------------------------------------------------

function planParts(plan) {
  const sum = (wanted) => plan.tensors.filter((t) => wanted(t.name)).reduce((n, t) => n + t.bytes, 0);
  const isScratch = (name) => name.startsWith("state.intermediate");
  const isKv = (name) => name.startsWith("kv.") || name.startsWith("draft_kv.");
  return [
    ["weights", "Weights", plan.weight_bytes],
    ["draft", "Draft weights", plan.draft_weight_bytes],
    ["kv", "KV cache", sum(isKv)],
    ["state", "Recurrent states", sum((n) => n.startsWith("state.") && !isScratch(n))],
    ["scratch", "Verify scratch", sum(isScratch)],
    ["other", "Tables", sum((n) => !n.startsWith("state.") && !isKv(n))],
  ].filter((part) => part[2] > 0);
}

function drawBar(name, parts, scale) {
  const bar = element("div", "bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label",
    `${name}: ${parts.map(([, label, size]) => `${label} ${bytes(size)}`).join(", ")}`);
  for (const [kind, label, size] of parts) {
    const piece = element("div", kind);
    piece.style.width = `${100 * size / scale}%`;
    piece.title = `${label}: ${bytes(size)}`;
    bar.append(piece);
  }
  byId("bars").append(element("p", "bar-name", name), bar);
}

function drawPlan(plan) {
  const parts = planParts(plan), freed = plan.lossless_bytes_freed;
  const used = parts.reduce((n, part) => n + part[2], 0);
  byId("bars").replaceChildren();
  drawBar(`This server: ${bytes(used)}`, parts, used + freed);
  if (freed > 0) {
    const more = parts.flatMap((part) =>
      part[0] === "scratch" ? [part, ["freed", "Snapshots", freed]] : [part]);
    drawBar(`The same sizes with the default verify: ${bytes(used + freed)}`, more, used + freed);
    const tokens = Math.floor(freed / (plan.kv_bytes_per_token + plan.draft_kv_bytes_per_token));
    byId("freed").textContent = `Lossless verify frees ${bytes(freed)}, ` +
      `room for ${tokens.toLocaleString("en")} more tokens in the KV cache.`;
    parts.push(["freed", "Freed by lossless verify", freed]);
  }
  byId("legend").replaceChildren(...parts.map(([kind, label, size]) => {
    const item = element("li");
    item.append(element("span", `swatch ${kind}`), `${label} ${bytes(size)}`);
    return item;
  }));
  byId("plan-rows").replaceChildren(...parts.map(([, label, size]) => {
    const row = element("tr");
    row.append(element("td", "", label), element("td", "", size.toLocaleString("en")));
    return row;
  }));
}

async function loadInfo() {
  const reply = await fetch("server_info", { headers: headers() });
  byId("key-form").hidden = reply.status !== 401;
  if (!reply.ok) throw new Error(reply.status === 401 ? "this server wants a key" : `HTTP ${reply.status}`);
  const info = await reply.json();
  byId("model").textContent = info.served_model_name;
  document.title = `${info.served_model_name} – server status`;
  const facts = [
    `version ${info.version}`, `device ${info.device}`,
    info.speculative_algorithm ? `drafts by ${info.speculative_algorithm}` : "no speculation",
    info.lossless_verify ? "lossless verify" : null,
    `context ${info.context_length}`, `${info.max_total_num_tokens} KV tokens`,
    info.simulated_accept_len ? "ACCEPTANCE IS SIMULATED" : null,
  ];
  byId("facts").textContent = facts.filter(Boolean).join(" · ");
  if (info.memory_plan) drawPlan(info.memory_plan);
}

// --- plots -------------------------------------------------------------------------------

const PLOTS = [
  ["running", "Running", (m) => m.num_running_reqs, (v) => v.toFixed(0)],
  ["queued", "Queued", (m) => m.num_queue_reqs, (v) => v.toFixed(0)],
  ["kv-use", "KV use", (m) => 100 * m.token_usage, (v) => `${v.toFixed(1)} %`],
  ["accept", "Accept length", (m) => m.spec_accept_length, (v) => v.toFixed(2)],
  ["throughput", "Throughput", (m) => m.rate, (v) => `${v.toFixed(1)} token/s`],
];
const series = Object.fromEntries(PLOTS.map(([id]) => [id, []]));
let last = null;

function makePlots() {
  for (const [id, title] of PLOTS) {
    const figure = element("figure"), caption = element("figcaption");
    const value = element("b", "", "–");
    value.id = `${id}-value`;
    caption.append(element("span", "", title), value);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", title);
    svg.id = `${id}-plot`;
    svg.append(document.createElementNS(svg.namespaceURI, "polyline"));
    figure.append(caption, svg);
    byId("plots").append(figure);
  }
}

function readMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^sglang:(\w+)\{[^}]*\} (\S+)$/.exec(line);
    if (match) found[match[1]] = Number(match[2]);
  }
  const now = performance.now(), total = found.generation_tokens_total;
  found.rate = last ? Math.max(0, total - last.total) / ((now - last.now) / 1000) : 0;
  last = { now, total };
  return found;
}

function drawPlots(metrics) {
  for (const [id, title, read, show] of PLOTS) {
    const values = series[id], value = read(metrics);
    values.push(value);
    if (values.length > KEPT) values.shift();
    const top = Math.max(...values, 1e-9), left = KEPT - values.length;
    const points = values.map((v, i) => `${left + i},${96 - 92 * v / top}`).join(" ");
    byId(`${id}-plot`).firstChild.setAttribute("points", points);
    byId(`${id}-plot`).setAttribute("aria-label",
      `${title}: now ${show(value)}, at most ${show(Math.max(...values))}`);
    byId(`${id}-value`).textContent = show(value);
  }
}

let hasInfo = false;
async function poll() {
  try {
    if (!hasInfo) { await loadInfo(); hasInfo = true; }
    const [metrics, health] = await Promise.all([fetch("metrics"), fetch("health")]);
    drawPlots(readMetrics(await metrics.text()));
    const state = health.ok ? "Ready" : (await health.json()).error.message;
    if (byId("state").textContent !== state) byId("state").textContent = state;
  } catch (error) {
    byId("state").textContent = `No figures: ${error.message}`;
  }
  setTimeout(poll, POLL_MS);
}

// --- prompt box --------------------------------------------------------------------------

let running = null;

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function appendTokens(meta, shown) {
  // The last token of a verify step is the model's own; those before it are accepted drafts.
  const own = new Set();
  let end = 0;
  for (const size of meta.step_lengths) { end += size; own.add(end - 1); }
  const tokens = meta.output_token_logprobs;
  for (let at = shown; at < tokens.length; at += 1) {
    const [value, id, text] = tokens[at];
    const span = element("span", own.has(at) ? "token" : "token accepted", text);
    span.title = `id ${id}, log probability ${value.toFixed(3)}`;
    byId("answer").append(span);
  }
  return tokens.length;
}

async function generate() {
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer").replaceChildren();
  byId("summary").textContent = "Generating …";
  const began = performance.now();
  let shown = 0, meta = null;
  try {
    const reply = await fetch("generate", {
      method: "POST",
      signal: running.signal,
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        text: byId("prompt").value,
        stream: true,
        return_logprob: true,
        return_text_in_logprobs: true,
        return_step_lengths: true,
        sampling_params: {
          max_new_tokens: Number(byId("max-tokens").value),
          temperature: Number(byId("temperature").value),
        },
      }),
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      meta = chunk.meta_info;
      shown = appendTokens(meta, shown);
    }
    const seconds = (performance.now() - began) / 1000;
    const accepted = byId("answer").querySelectorAll(".accepted").length;
    byId("summary").textContent = `${shown} tokens in ${seconds.toFixed(2)} s, ${accepted} of them ` +
      `accepted drafts; ended by ${meta.finish_reason.type}.`;
  } catch (error) {
    byId("summary").textContent =
      error.name === "AbortError" ? `Stopped after ${shown} tokens.` : `Failed: ${error.message}`;
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

byId("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) generate();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey && !running) { event.preventDefault(); generate(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
byId("stop").addEventListener("click", () => { if (running) running.abort(); });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
});

makePlots();
poll();
