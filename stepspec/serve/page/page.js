// The page of the service. It asks a question through the public API, shows the steps as they arrive, and times the
// target alone on the same question. Text from models only becomes text nodes.

const EXAMPLE =
  "Some friends met. Cara has 40 coins. Finn has half as many coins as Cara. Dan has half as many coins as Finn. " +
  "Gina has as many coins as Dan and Finn together. How many coins does Gina have?";
const MAX_TOKENS = 2048;
const ORIGINS = { draft: "Draft", salvaged: "Both", target: "Target" };
const KEY = "stepspec-key";
const POLL_MS = 2000;
const WINDOW_MS = 30000; // tokens are counted when a request ends, so a shorter window would mostly show 0
const TICK_MS = 50;

const $ = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 0 });
const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(0)}%` : "–");
const setStatus = (text) => ($("status").textContent = text);
const plural = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

function make(tag, name, ...children) {
  const element = document.createElement(tag);
  element.className = name;
  element.append(...children);
  return element;
}

class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The service could not be reached. Check that it is running, then ask again.");
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The service returned status ${response.status}.`;
  const wait = response.headers.get("Retry-After");
  throw new ServiceError(wait ? `${message} Wait at least ${wait} s.` : message, response.status);
}

// Yields the JSON of each `data:` line. A stream that ends without `[DONE]` is an error.
async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream ended early");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // a comment keeps the connection open
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function stream(model, question, signal, onChunk) {
  const messages = [{ role: "user", content: question }];
  const options = { stream: true, stream_options: { include_usage: true }, stepspec: { events: true } };
  const body = JSON.stringify({ model, messages, ...options, max_completion_tokens: MAX_TOKENS });
  const headers = { "Content-Type": "application/json" };
  const response = await call("v1/chat/completions", { method: "POST", headers, body, signal });
  try {
    for await (const chunk of chunksOf(response)) {
      if (chunk.error) throw new ServiceError(chunk.error.message);
      onChunk(chunk);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServiceError) throw error;
    throw new ServiceError("The connection broke off before the answer was complete. Ask again.");
  }
}

// Shows the steps and the answer of one request.
class Reasoning {
  constructor() {
    this.proposals = new Map(); // by index of the step
    this.steps = [];
    this.content = "";
    this.open = ""; // text of the step that is being written
    this.inAnswer = ""; // steps that the answer repeats, as the model does not separate its thinking
    $("steps").replaceChildren();
    $("strip").replaceChildren();
    this.showPending();
    this.showAnswer("");
    this.showCounts();
  }

  read({ choices, stepspec: { step, event, note } = {} }) {
    const delta = choices[0]?.delta ?? {};
    const box = $("scroll");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 60; // the reader has not scrolled up
    if (note) showNote(note);
    if (step) this.commit(step, delta);
    else this.open += delta.reasoning ?? "";
    if (event?.type === "step.proposed") this.proposed(event.index).push({ ...event });
    if (event?.type === "step.judged") this.judge(event);
    if (step || event) this.showPending();
    if (follows) box.scrollTop = box.scrollHeight;
    if (delta.content) this.showAnswer(delta.content);
  }

  proposed(index) {
    return this.proposals.get(index) ?? this.proposals.set(index, []).get(index);
  }

  judge({ index, accepted, scores }) {
    const proposal = this.proposed(index).find((each) => each.accepted === undefined);
    if (proposal) Object.assign(proposal, { accepted, scores });
    if (accepted) return;
    for (const later of this.proposals.keys()) if (later > index) this.proposals.delete(later); // they followed it
  }

  commit(step, delta) {
    const text = delta.reasoning === undefined ? (step.text ?? delta.content ?? "") : this.open + delta.reasoning;
    this.open = "";
    if (delta.reasoning === undefined) this.inAnswer += text;
    this.steps.push(step);
    const author = ORIGINS[step.origin] ?? step.origin;
    const about = ` ${plural(step.num_tokens, "token")} · ${scoresOf(step.scores)}`;
    const refused = this.proposed(step.index).filter((each) => each.accepted === false && each.text.trim());
    const parts = [make("p", "about", make("b", "", author), about), make("p", "text", text.trim())];
    $("steps").append(make("li", `step ${step.origin}`, ...parts, ...refused.map(refusedText)));
    const segment = make("i", step.origin);
    segment.style.flexGrow = step.num_tokens;
    $("strip").append(segment);
    this.showCounts();
    setStatus(`Step ${this.steps.length}: ${author}`);
  }

  showCounts() {
    const tokens = (steps) => steps.reduce((sum, step) => sum + step.num_tokens, 0);
    for (const origin of Object.keys(ORIGINS)) {
      const own = this.steps.filter((step) => step.origin === origin);
      const counts = `${plural(own.length, "step")}, ${percent(tokens(own), tokens(this.steps))}`;
      $("legend").querySelector(`.${origin} .count`).textContent = this.steps.length ? counts : "–";
    }
  }

  // Shows the proposal for the step after the committed ones.
  showPending() {
    const proposal = this.proposed(this.steps.length ? this.steps.at(-1).index + 1 : 0).at(-1);
    $("pending").hidden = !proposal?.text.trim();
    if (!$("pending").hidden) {
      const verdict = { true: "accepted", false: "refused" }[proposal.accepted] ?? "not judged yet";
      $("pending").querySelector(".about").replaceChildren(make("b", "", "Proposed"), ` by the draft · ${verdict}`);
      $("pending").querySelector(".text").textContent = proposal.text.trim();
    }
  }

  showAnswer(more) {
    this.content += more;
    const repeats = this.inAnswer && this.content.startsWith(this.inAnswer);
    const text = repeats ? this.content.slice(this.inAnswer.length) : this.content;
    $("answer").textContent = text.trim() || this.content.trim() || "–";
  }
}

function scoresOf(scores) {
  const shown = ([judge, score]) => `${judge} ${score === null ? "–" : score.toFixed(2).replace("-", "−")}`;
  return Object.entries(scores ?? {}).map(shown).join(" · ") || "no score";
}

function refusedText({ text, scores }) {
  return make("details", "", make("summary", "", `Refused text · ${scoresOf(scores)}`), make("p", "text", text.trim()));
}

class Clock {
  static shown = [];

  constructor(id, label) {
    this.row = $(id);
    this.row.hidden = false;
    this.row.querySelector("dt").textContent = label;
    this.row.querySelector("small").textContent = "";
    this.started = performance.now();
    this.timer = setInterval(() => this.show(), TICK_MS);
    Clock.shown.push(this);
    this.show();
  }

  show() {
    this.ms = this.final ?? performance.now() - this.started;
    this.row.querySelector(".clock").textContent = `${(this.ms / 1000).toFixed(2)} s`;
    const longest = Math.max(...Clock.shown.map((clock) => clock.ms));
    for (const clock of Clock.shown) clock.row.style.setProperty("--share", clock.ms / longest);
  }

  // Stops at the service's own time, which leaves the queue out, or else at the time that has passed.
  stop({ metrics, usage }) {
    clearInterval(this.timer);
    this.final = metrics?.generation_time_ms ?? performance.now() - this.started;
    this.row.querySelector("small").textContent = usage ? plural(usage.completion_tokens, "token") : "not finished";
    this.show();
  }
}

// Asks one model, and returns its answer and what the last chunks say.
async function timed(clock, model, question, signal, onChunk) {
  const run = { answer: "" };
  try {
    await stream(model, question, signal, (chunk) => {
      run.answer += chunk.choices[0]?.delta.content ?? "";
      run.reason = chunk.choices[0]?.finish_reason ?? run.reason;
      run.usage = chunk.usage ?? run.usage;
      run.metrics = chunk.metrics ?? run.metrics;
      onChunk(chunk);
    });
  } finally {
    clock.stop(run);
  }
  return run;
}

let models = [];
let stopping = null;

async function ask() {
  const question = $("question").value.trim();
  if (!question || stopping || !models.length) return;
  stopping = new AbortController();
  $("go").disabled = true;
  $("stop").disabled = false;
  showError("");
  Clock.shown = [];
  for (const id of ["target", "ratio", "target-answer", "note"]) $(id).hidden = true;
  try {
    await compare(models.find((each) => each.id === $("model").value), question, stopping.signal);
  } catch (error) {
    fail(error);
  }
  stopping = null;
  $("go").disabled = !models.length;
  $("stop").disabled = true;
  poll();
}

// Shows the answer, then times the target alone.
async function compare(model, question, signal) {
  const clock = new Clock("ours", model.policy);
  const summary = await answer(clock, model, question, signal);
  const target = models.find((each) => each.id === `${model.base}@target`);
  if (!target || model.policy === "target" || !$("compare").checked) return;
  setStatus(`${summary} · timing the target alone …`);
  const alone = new Clock("target", "target alone");
  const other = await timed(alone, target.id, question, signal, () => {});
  $("times").textContent = `${(alone.ms / clock.ms).toFixed(1)}×`;
  $("ratio").hidden = $("target-answer").hidden = false;
  $("target-answer").querySelector(".text").textContent = other.answer.trim() || "–";
  setStatus(summary);
}

function showNote(text) {
  $("note").textContent = text;
  $("note").hidden = !text;
}

async function answer(clock, model, question, signal) {
  const reasoning = new Reasoning();
  setStatus("Waiting for the first step …");
  $("answer").ariaBusy = "true"; // screen readers read the answer when it is complete
  try {
    const run = await timed(clock, model.id, question, signal, (chunk) => reasoning.read(chunk));
    const cut = run.reason === "length" && "The answer was cut off at the limit of tokens.";
    showNote([run.metrics?.stepspec?.note, cut].filter(Boolean).join(" "));
    return setStatus(summaryOf(run, reasoning.steps.length));
  } finally {
    $("pending").hidden = true;
    $("answer").ariaBusy = "false";
  }
}

function summaryOf({ metrics }, numSteps) {
  const counts = metrics?.stepspec?.counts;
  const judged = counts?.steps_judged && `${counts.steps_accepted} of ${counts.steps_judged} proposed accepted`;
  const rate = metrics?.tokens_per_second && `${whole(metrics.tokens_per_second)} tokens/s`;
  return [plural(numSteps, "step"), judged, rate].filter(Boolean).join(" · ");
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function fail(error) {
  setStatus(error.name === "AbortError" ? "Stopped." : "");
  if (error.name === "AbortError") return;
  if (error.status === 401) return askForKey(error);
  if (!(error instanceof ServiceError)) console.error(error); // a mistake of this page
  showError(error.message);
}

// Returns whether the service has listed its models.
async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    models = data.map((card) => ({ ...card, base: baseOf(card, data) }));
    showModels();
    $("key-form").hidden = true;
    $("go").disabled = false;
  } catch (error) {
    fail(error);
  }
  return models.length > 0;
}

// Returns the model's name without its policy.
function baseOf({ id, policy }, cards) {
  const base = id.endsWith(`@${policy}`) ? id.slice(0, -policy.length - 1) : id;
  return cards.some((card) => card.id === base) ? base : id;
}

function showModels() {
  const several = models.some(({ base }) => base !== models[0].base);
  const nameOf = ({ base, policy }) => (several ? `${base} · ${policy}` : policy);
  $("model").replaceChildren();
  for (const card of models) {
    const isDefault = card.id === card.base;
    const isAgain = !isDefault && models.some(({ id, policy }) => id === card.base && policy === card.policy);
    if (!isAgain) $("model").append(new Option(isDefault ? `${nameOf(card)} (default)` : nameOf(card), card.id));
  }
}

function askForKey(error) {
  if (sessionStorage.getItem(KEY)) showError(error.message);
  sessionStorage.removeItem(KEY);
  models = [];
  $("key-form").hidden = false;
  $("go").disabled = true;
  $("key").focus();
}

async function useKey(event) {
  event.preventDefault();
  showError("");
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  if (await loadModels()) $("question").focus();
}

let polls = [];

async function poll() {
  if (document.hidden) return;
  const text = await call("metrics").then((response) => response.text()).catch(() => "");
  const total = (name) => sumOf(text, `stepspec_${name}`);
  const show = (id, value) => ($(id).textContent = value ?? "–");
  show("running", total("requests_running"));
  show("queued", total("requests_queued"));
  show("rate", rateOf(total("committed_tokens_total")));
  show("steps-accepted", percent(total("steps_accepted_total") ?? 0, total("steps_judged_total")));
  show("tokens-accepted", percent(total("token_accepted_total") ?? 0, total("token_drafted_total")));
}

// Returns the sum of a series over its labels, or undefined if it is missing.
function sumOf(text, name) {
  const lines = [...text.matchAll(new RegExp(`^${name}(?:\\{.*\\})? (\\S+)`, "gm"))];
  return lines.length ? lines.reduce((sum, [, value]) => sum + Number(value), 0) : undefined;
}

function rateOf(tokens) {
  if (tokens === undefined) return undefined;
  const now = performance.now();
  polls = polls.filter((each) => now - each.at < WINDOW_MS && each.tokens <= tokens); // fewer after a restart
  polls.push({ at: now, tokens });
  const [first] = polls;
  return now > first.at ? whole((1000 * (tokens - first.tokens)) / (now - first.at)) : undefined;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => stopping?.abort());
$("key-form").addEventListener("submit", useKey);
document.addEventListener("visibilitychange", poll);
setInterval(poll, POLL_MS);

$("question").value = EXAMPLE;
poll();
const wantsExample = new URLSearchParams(location.search).get("example") !== "0";
if ((await loadModels()) && wantsExample && !sessionStorage.getItem(KEY)) ask(); // with a key, only on demand
