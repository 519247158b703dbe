// Shows problems and their steps. Whatever a model wrote becomes text nodes; nothing here makes markup of a string.
"use strict";

const ORIGINS = { d: "draft", s: "salvaged", t: "target" };
const MARKS = { correct: "✓", incorrect: "✗", no_answer: "∅", parse_error: "?", timeout: "?" };
const STATUSES = {
  correct: "correct",
  incorrect: "wrong",
  no_answer: "no answer",
  parse_error: "not read by the grader",
  timeout: "the grader gave up",
};
const AT_A_TIME = 150; // problems in the list before it is asked for more

// Makes an element; strings among the children become text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// What an embedded script tag holds: JSON, as gzip, as base64.
async function unpack(script) {
  const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function outcomeOf([status, answer, foundBy, decidedBy, why, truncated, seconds, tokens, origins]) {
  return { status, answer, foundBy, decidedBy, why, truncated: Boolean(truncated), seconds, tokens, origins };
}

function problemOf(packed) {
  const outcomes = packed.outcomes.map(
    (repeats) => new Map(Object.entries(repeats).map(([repeat, outcome]) => [Number(repeat), outcomeOf(outcome)])),
  );
  const words = [packed.id, packed.preview, packed.gold];
  for (const repeats of outcomes) for (const outcome of repeats.values()) words.push(outcome.answer ?? "");
  return { ...packed, outcomes, words: words.join("\n").toLowerCase() };
}

const isRight = (outcome) => outcome?.status === "correct";

// By the name of a filter, whether a problem passes it by its outcomes in one repeat: (target's outcome, that of the policy, all).
const FILTERS = {
  all: () => true,
  lost: (target, here) => isRight(target) && here && !isRight(here),
  won: (target, here) => target && !isRight(target) && isRight(here),
  differs: (target, here, all) => all.some(isRight) && !all.every(isRight),
  everywhere: (target, here, all) => all.length > 0 && !all.some(isRight),
  truncated: (target, here) => here?.truncated,
  none: (target, here) => here?.status === "no_answer",
  traced: () => true,
};

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toPrecision(3)} s`;
}

class Browser {
  constructor(section) {
    this.section = section;
    this.key = section.dataset.run;
    this.scripts = new Map(
      [...section.querySelectorAll("script[data-part]")].map((script) => [script.dataset.part, script]),
    );
    this.chunks = new Map();
    this.opened = new Map(); // chunks that are here already, for the search
    this.limit = AT_A_TIME;
    this.side = 0;
    this.places = [0, 0]; // the step that each side is at
  }

  role(name) {
    return this.section.querySelector(`[data-role="${name}"]`);
  }

  async start() {
    if (typeof DecompressionStream === "undefined") {
      this.role("detail").append("This browser is too old to open what is packed into this page.");
      return;
    }
    const index = await unpack(this.scripts.get("index"));
    this.policies = index.policies;
    this.problems = index.problems.map(problemOf);
    this.target = this.policies.indexOf("target");
    const here = this.policies.indexOf(this.role("policy").value);
    this.shown = [Math.max(this.target, 0), here === this.target ? this.policies.length - 1 : here];
    this.listen();
    this.filter();
  }

  get repeat() {
    return Number(this.role("repeat")?.value ?? this.firstRepeat());
  }

  firstRepeat() {
    return this.problems[0]?.outcomes.flatMap((repeats) => [...repeats.keys()])[0] ?? 0;
  }

  listen() {
    for (const name of ["show", "policy", "level", "repeat"]) {
      this.role(name)?.addEventListener("change", () => this.refilter(name));
    }
    this.role("search").addEventListener("input", () => this.refilter("search"));
    this.role("list").addEventListener("keydown", (event) => this.keyInList(event));
    this.role("list").addEventListener("click", (event) => this.clickInList(event));
    this.role("more").addEventListener("click", () => this.showMore());
    this.role("detail").addEventListener("click", (event) => this.clickInSteps(event));
    this.role("detail").addEventListener("keydown", (event) => this.keyInSteps(event));
    this.section.addEventListener("keydown", (event) => this.keyAnywhere(event));
  }

  async refilter(changed) {
    this.limit = AT_A_TIME;
    if (changed === "policy") this.shown[1] = this.policies.indexOf(this.role("policy").value);
    this.filter();
    if (changed === "search" && this.role("search").value) {
      await this.openAll();
      this.filter();
    }
  }

  // Of the problems those that pass all filters, and the list and the detail with them.
  filter() {
    const wanted = this.role("search").value.trim().toLowerCase();
    const level = this.role("level")?.value ?? "";
    this.found = this.problems.filter(
      (problem) =>
        this.passes(problem) &&
        (level === "" || String(problem.level) === level) &&
        (wanted === "" || problem.words.includes(wanted) || this.saysInSteps(problem, wanted)),
    );
    this.role("count").value = `${this.found.length.toLocaleString("en")} of ${this.problems.length.toLocaleString("en")}`;
    if (!this.found.includes(this.problem)) this.problem = this.found[0];
    this.showList();
    return this.showProblem();
  }

  // In the chosen repeat, which is the one that the detail shows.
  passes(problem) {
    const show = this.role("show").value;
    if (show === "traced") return problem.chunk >= 0;
    const repeat = this.repeat;
    const outcomeUnder = (policy) => problem.outcomes[policy]?.get(repeat);
    const all = this.policies.map((_, policy) => outcomeUnder(policy)).filter(Boolean);
    const here = this.policies.indexOf(this.role("policy").value);
    return FILTERS[show](outcomeUnder(this.target), outcomeUnder(here), all);
  }

  saysInSteps(problem, wanted) {
    const traced = this.opened.get(problem.chunk)?.[problem.id];
    return Boolean(traced) && [traced.question, ...traced.texts].some((text) => text.toLowerCase().includes(wanted));
  }

  chunk(number) {
    if (!this.chunks.has(number)) {
      const opening = unpack(this.scripts.get(String(number)));
      this.chunks.set(number, opening);
      opening.then((chunk) => this.opened.set(number, chunk));
    }
    return this.chunks.get(number);
  }

  async openAll() {
    for (const part of this.scripts.keys()) if (part !== "index") await this.chunk(Number(part));
  }

  showList() {
    const list = this.role("list");
    list.replaceChildren(...this.found.slice(0, this.limit).map((problem) => this.listed(problem)));
    this.role("more").hidden = this.found.length <= this.limit;
    this.role("more").textContent = `${this.found.length - this.limit} more`;
    this.role("none").hidden = this.found.length > 0;
    this.mark();
  }

  listed(problem) {
    const marks = problem.outcomes.map((repeats, policy) => this.outcomeMark(repeats, policy));
    const preview = problem.preview || (problem.gold ? `answer ${problem.gold}` : "");
    return make(
      "div",
      { role: "option", class: "item", id: `${this.key}-item-${this.problems.indexOf(problem)}` },
      make("span", { class: "id" }, problem.id),
      make("span", { class: "marks" }, ...marks),
      make("span", { class: "preview" }, preview),
    );
  }

  outcomeMark(repeats, policy) {
    const all = [...repeats.values()];
    const right = all.filter(isRight).length;
    const name = this.policies[policy];
    if (!all.length) return make("span", { class: "mark", title: `${name}: not run` }, "·");
    const words = all.length > 1 ? `${right} of ${all.length} correct` : STATUSES[all[0].status];
    const text = all.length > 1 ? String(right) : MARKS[all[0].status];
    const kind = right === all.length ? "right" : right ? "partly" : "wrong";
    return make("span", { class: `mark ${kind}`, title: `${name}: ${words}`, "aria-label": `${name}: ${words}` }, text);
  }

  mark() {
    const list = this.role("list");
    const place = this.problems.indexOf(this.problem);
    for (const item of list.querySelectorAll("[aria-selected]")) item.removeAttribute("aria-selected");
    const item = document.getElementById(`${this.key}-item-${place}`);
    if (!item) return list.removeAttribute("aria-activedescendant");
    item.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", item.id);
    scrollInside(list.parentElement, item);
  }

  showMore() {
    this.limit += AT_A_TIME;
    this.showList();
  }

  clickInList(event) {
    const item = event.target.closest(".item");
    if (item) this.open(this.problems[Number(item.id.split("-").pop())]);
  }

  keyInList(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      event.preventDefault();
      this.move(moves[event.key]);
    } else if (event.key === "Enter" || event.key === "ArrowRight") {
      event.preventDefault();
      this.focusStep();
    }
  }

  keyAnywhere(event) {
    const typing = event.target.closest("input, select, textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "n" || event.key === "p") {
      this.move(event.key === "n" ? 1 : -1);
    } else if (event.key === "/") {
      event.preventDefault();
      this.role("search").focus();
    }
  }

  move(by) {
    const place = this.found.indexOf(this.problem) + by;
    const next = Math.min(Math.max(place, 0), this.found.length - 1);
    if (next >= this.limit) {
      this.limit = next + AT_A_TIME;
      this.showList();
    }
    if (this.found[next]) return this.open(this.found[next]);
  }

  open(problem, places = [0, 0]) {
    this.problem = problem;
    this.places = places;
    this.mark();
    return this.showProblem().then(() => this.remember());
  }

  async showProblem() {
    const problem = this.problem;
    const detail = this.role("detail");
    if (!problem) return detail.replaceChildren();
    const traced = problem.chunk >= 0 ? (await this.chunk(problem.chunk))[problem.id] : null;
    if (problem !== this.problem) return; // another one was asked for meanwhile
    const facts = [problem.level === null ? "" : `level ${problem.level}`, problem.subject ?? ""].filter(Boolean);
    const hadFocus = detail.contains(document.activeElement) && document.activeElement.closest(".step");
    detail.replaceChildren(
      make("header", {}, make("h3", {}, problem.id), make("span", { class: "facts-inline" }, facts.join(", "))),
      traced ? make("p", { class: "question" }, traced.question) : null,
      make("p", { class: "gold" }, "Right answer: ", make("b", {}, problem.gold)),
      make("div", { class: "columns" }, this.column(problem, traced, 0), this.column(problem, traced, 1)),
    );
    this.markSteps();
    if (hadFocus) this.focusStep();
  }

  column(problem, traced, side) {
    const policy = this.shown[side];
    const outcome = problem.outcomes[policy]?.get(this.repeat);
    const trace = traced?.traces[`${policy} ${this.repeat}`];
    const column = make("section", { class: "column", "data-side": side, "aria-label": this.policies[policy] });
    column.append(this.policyChoice(side, policy));
    if (!outcome) column.append(make("p", { class: "empty" }, "Not run."));
    else column.append(...this.outcomeWords(outcome), this.strip(outcome, trace, side));
    if (trace) column.append(...this.steps(trace, traced.texts));
    else if (outcome) column.append(make("p", { class: "empty" }, "The texts of these steps are not in this page."));
    return column;
  }

  policyChoice(side, policy) {
    const options = this.policies.map((name, index) => make("option", { value: index, selected: index === policy }, name));
    const choice = make("select", { "aria-label": side ? "Policy on the right" : "Policy on the left" }, ...options);
    choice.addEventListener("change", () => {
      this.shown[side] = Number(choice.value);
      this.places[side] = 0;
      this.showProblem().then(() => {
        this.remember();
        this.section.querySelector(`[data-side="${side}"] select`).focus();
      });
    });
    return choice;
  }

  outcomeWords(outcome) {
    const how = [
      outcome.foundBy === null ? "" : `found by ${outcome.foundBy}`,
      outcome.decidedBy === null ? "" : `decided by ${outcome.decidedBy}`,
    ].filter(Boolean);
    const said = outcome.answer === null ? "" : `answer ${outcome.answer}`;
    const cost = [seconds(outcome.seconds), `${outcome.tokens.toLocaleString("en")} tokens`];
    if (outcome.truncated) cost.push("cut off by the token limit");
    return [
      make(
        "p",
        { class: "outcome" },
        make("b", { class: isRight(outcome) ? "right" : "wrong" }, `${MARKS[outcome.status]} ${STATUSES[outcome.status]}`),
        said ? ` ${said}` : "",
        how.length ? make("small", {}, ` ${how.join(", ")}`) : "",
      ),
      make("p", { class: "why" }, [outcome.why, cost.join(", ")].filter(Boolean).join(" ")),
    ];
  }

  // A segment a step, as wide as it has tokens where those are known.
  strip(outcome, trace, side) {
    const steps = trace ? trace[0].map(([, origin, size]) => [origin, size]) : [...outcome.origins].map((each) => [each, 1]);
    const segments = steps.map(([origin, size], index) => {
      const segment = make("i", { class: ORIGINS[origin], title: `step ${index + 1}: ${ORIGINS[origin]}` });
      segment.style.flexGrow = Math.max(size, 1);
      segment.addEventListener("click", () => this.goTo(side, index));
      return segment;
    });
    return make("div", { class: "strip", "aria-hidden": "true" }, ...segments);
  }

  steps([steps, answer], texts) {
    const items = steps.map(([text, origin, size, fromDraft, scores], index) => {
      const told = [`${size} tokens`];
      if (origin === "s") told.push(`${fromDraft} from the draft`);
      if (origin !== "d" && Object.keys(scores).length) told.push("the draft's step was refused");
      for (const [judge, score] of Object.entries(scores)) told.push(`${judge} ${score === null ? "not readable" : score}`);
      return make(
        "li",
        { class: `step ${ORIGINS[origin]}`, tabindex: "-1" },
        make("div", { class: "told" }, make("b", {}, `${index + 1} ${ORIGINS[origin]}`), ` ${told.join(" · ")}`),
        make("div", { class: "text" }, texts[text].trimEnd()),
      );
    });
    const said = answer === null ? [] : [make("h4", {}, "Answer"), make("div", { class: "text answer" }, texts[answer])];
    return [make("ol", { class: "steps" }, ...items), ...said];
  }

  stepsOf(side) {
    return [...this.section.querySelectorAll(`[data-side="${side}"] .step`)];
  }

  markSteps() {
    for (const side of [0, 1]) {
      this.stepsOf(side).forEach((step, index) => {
        const here = index === this.places[side];
        step.tabIndex = here ? 0 : -1;
        step.toggleAttribute("data-here", here);
      });
    }
  }

  goTo(side, place) {
    const steps = this.stepsOf(side);
    if (!steps.length) return;
    this.side = side;
    this.places[side] = Math.min(Math.max(place, 0), steps.length - 1);
    this.markSteps();
    this.focusStep();
    this.remember();
  }

  focusStep() {
    const step = this.stepsOf(this.side)[this.places[this.side]];
    if (!step) return;
    step.focus({ preventScroll: true });
    step.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  clickInSteps(event) {
    const step = event.target.closest(".step");
    if (!step) return;
    const side = Number(step.closest("[data-side]").dataset.side);
    this.goTo(side, this.stepsOf(side).indexOf(step));
  }

  keyInSteps(event) {
    const step = event.target.closest(".step");
    if (!step) return;
    const side = Number(step.closest("[data-side]").dataset.side);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, Home: -Infinity, End: Infinity };
    const sides = { ArrowLeft: 0, ArrowRight: 1 };
    if (event.key in moves) this.goTo(side, this.places[side] + moves[event.key]);
    else if (event.key in sides) this.goTo(sides[event.key], this.places[sides[event.key]]);
    else if (event.key === "Escape") this.role("list").focus();
    else return;
    event.preventDefault();
  }

  // Puts into the address what is shown, so that it can be sent to somebody.
  remember() {
    const [left, right] = this.shown.map((policy) => this.policies[policy]);
    const told = { run: this.key, problem: this.problem.id, left, right, repeat: this.repeat };
    if (this.places[this.side]) told[this.side ? "rightstep" : "leftstep"] = this.places[this.side] + 1;
    history.replaceState(null, "", `#${new URLSearchParams(told)}`);
  }

  // Shows what an address tells.
  async follow(told) {
    const problem = this.problems?.find((each) => each.id === told.get("problem"));
    if (!problem) return;
    ["left", "right"].forEach((name, side) => {
      const policy = this.policies.indexOf(told.get(name));
      if (policy >= 0) this.shown[side] = policy;
    });
    const repeat = this.role("repeat");
    if (repeat && told.has("repeat")) repeat.value = told.get("repeat");
    this.role("show").value = "all";
    this.role("search").value = "";
    if (this.role("level")) this.role("level").value = "";
    this.limit = Math.max(this.limit, this.problems.indexOf(problem) + AT_A_TIME);
    const places = ["leftstep", "rightstep"].map((name) => Math.max(0, (Number(told.get(name)) || 1) - 1));
    this.side = told.has("rightstep") ? 1 : 0;
    this.problem = problem;
    this.places = places;
    await this.filter();
    this.section.scrollIntoView();
    if (told.has("leftstep") || told.has("rightstep")) this.focusStep();
  }
}

// Scrolls a list to its item without moving the page.
function scrollInside(list, item) {
  const [around, inside] = [list.getBoundingClientRect(), item.getBoundingClientRect()];
  if (inside.top < around.top) list.scrollTop -= around.top - inside.top;
  else if (inside.bottom > around.bottom) list.scrollTop += inside.bottom - around.bottom;
}

function setUpTheme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const show = () => (button.textContent = `Theme: ${root.dataset.theme ?? "auto"}`);
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme ?? "auto") + 1) % themes.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("stepspec-theme", next);
    } catch {
      // A page from the disk may not be allowed to keep anything.
    }
    show();
  });
  show();
}

function setUpSettings() {
  const runs = [...document.querySelectorAll("article.run")];
  const choice = document.getElementById("setting");
  const choose = (key) => {
    for (const run of runs) run.hidden = run.id !== key;
    if (choice) choice.value = key;
  };
  choice?.addEventListener("change", () => choose(choice.value));
  choose(runs[0].id);
  return (key) => runs.some((run) => run.id === key) && choose(key);
}

// Everything is on paper, also what is folded on the screen.
function setUpPrinting() {
  const folded = new Set();
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      folded.add(details);
      details.open = true;
    }
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
    folded.clear();
  });
}

async function setUp() {
  setUpTheme();
  setUpPrinting();
  const choose = setUpSettings();
  const browsers = new Map();
  for (const section of document.querySelectorAll("section.problems")) {
    const browser = new Browser(section);
    browsers.set(browser.key, browser);
    await browser.start();
  }
  const follow = () => {
    const told = new URLSearchParams(location.hash.slice(1));
    if (!told.has("run")) return;
    choose(told.get("run"));
    return browsers.get(told.get("run"))?.follow(told);
  };
  addEventListener("hashchange", follow);
  await follow();
  document.documentElement.dataset.ready = "";
}

setUp();
