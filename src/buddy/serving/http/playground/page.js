// The playground: one or two panes, each a conversation at a budget of its own.

import { chunks, get } from "./stream.js";

const MOST_COLUMNS = 512; // of a strip; older ones go
const KEY = "buddy-key";
const SHARES = [1, 0.5]; // of the blocks, in each pane until it is set
const SAMPLES = [
  "What is the capital of France?",
  "Name three fruits.",
  "Write a haiku about rain.",
  "Count to ten.",
];
const $ = (id) => document.getElementById(id);

let facts = null;
let panes = [];
let running = null; // an AbortController while answers come

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const KINDS = [["fraction", "Fixed"], ["mean", "Mean"], ["auto", "Auto"], ["deadline", "Deadline"]];

// Why a kind of budget cannot be chosen; nothing where it can.
function whyNot(kind) {
  if (kind === "auto" && !facts.has_predictor) return "This model has no Budget Predictor";
  if (kind === "mean" && !facts.means) return "This model has no ledger";
  return "";
}

class Pane {
  constructor(name, share) {
    this.name = name;
    this.messages = [];
    this.root = $("pane-template").content.firstElementChild.cloneNode(true);
    this.part = (selector) => this.root.querySelector(selector);
    this.root.dataset.pane = name;
    this.part("h2").textContent = `Answer ${name}`;
    this.part(".log").setAttribute("aria-label", `Conversation ${name}`);
    this.log = this.part(".log");
    this.strip = this.part(".strip");
    this.addKinds();
    this.setUpSettings(share);
    this.clear();
  }

  addKinds() {
    for (const [value, text] of KINDS) {
      const input = element("input", { type: "radio", name: `kind-${this.name}`, value });
      input.checked = value === "fraction";
      input.disabled = whyNot(value) !== "";
      input.addEventListener("change", () => this.show(value));
      const label = element("label", {}, input, element("span", { textContent: text }));
      if (input.disabled) label.title = whyNot(value);
      this.part(".kinds").append(label);
    }
  }

  setUpSettings(share) {
    this.setUpSlider("fraction", share, [facts.least_blocks, facts.num_blocks]);
    this.setUpSlider("mean", share, facts.means ?? [facts.least_blocks, facts.num_blocks]);
    const least = facts.least_ms_per_token;
    this.part(".ms").value = Math.max(1, Math.ceil(least * 2));
    this.part(".deadline-help").textContent =
      `As deep as this time allows. This machine reaches ${least.toPrecision(3)} ms alone.`;
  }

  setUpSlider(kind, share, [least, most]) {
    const [slider, chosen] = [this.part(`.${kind} .slider`), this.part(`.${kind} .chosen`)];
    slider.min = least;
    slider.max = most;
    slider.value = Math.round(share * facts.num_blocks);
    const say = () => {
      const percent = Math.round((100 * slider.value) / facts.num_blocks);
      chosen.textContent = `${slider.value} of ${facts.num_blocks} (${percent} %)`;
      slider.setAttribute("aria-valuetext", chosen.textContent);
    };
    slider.addEventListener("input", say);
    say();
  }

  show(kind) {
    for (const [one] of KINDS) this.part(`.setting.${one}`).hidden = one !== kind;
  }

  get budget() {
    const kind = this.root.querySelector(".kinds input:checked").value;
    if (kind === "auto") return "auto";
    if (kind === "deadline") return { ms_per_token: Number(this.part(".ms").value) };
    const blocks = `${this.part(`.${kind} .slider`).value} blocks`;
    return kind === "mean" ? { mean: blocks } : blocks;
  }

  clear() {
    this.messages = [];
    this.log.replaceChildren(
      element("p", { className: "empty muted", textContent: "Nothing said yet." }),
    );
    this.clearDepth();
  }

  clearDepth() {
    this.strip.replaceChildren();
    this.figures({});
    this.part(".axis-top").textContent = facts.num_blocks;
    this.describe(0, 0);
  }

  say(role, text) {
    this.log.querySelector(".empty")?.remove();
    const body = element("p", { className: "text", textContent: text });
    const who = { user: "You", assistant: "Model", error: "Error" }[role];
    const heading = element("p", { className: "who", textContent: who });
    this.log.append(element("article", { className: `said ${role}` }, heading, body));
    this.showEnd();
    return body;
  }

  showEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  // One column for each token: the first block at the bottom, as the residual stream runs upwards.
  column(run) {
    const made = element("span", { className: "column" });
    for (let block = run.length - 1; block >= 0; block--) {
      made.append(element("i", { className: run[block] === "1" ? "ran" : "" }));
    }
    this.strip.append(made);
    if (this.strip.childElementCount > MOST_COLUMNS) this.strip.firstElementChild.remove();
    this.strip.scrollLeft = this.strip.scrollWidth;
  }

  describe(tokens, blocks) {
    const mean = tokens ? (blocks / tokens).toFixed(1) : 0;
    const text = tokens
      ? `${tokens} tokens, ${mean} of ${facts.num_blocks} blocks each`
      : "A column for each token, a cell for each block; lit cells ran.";
    this.part(".depth-text").textContent = text;
    this.strip.setAttribute("aria-label", `Depth strip: ${text}`);
  }

  wait(name) {
    this.clearDepth();
    this.part(".depth-text").textContent = `Waits for answer ${name}: one at a time, speeds compare.`;
  }

  figures({ speed, spent, saved, budget }) {
    const rows = [
      ["Tokens/s", speed ?? "–"],
      ["Blocks spent", spent ?? "–"],
      ["Of full depth", saved ?? "–"],
      ["Budget", budget ?? "–"],
    ];
    this.part(".figures").replaceChildren(
      ...rows.map(([name, value]) =>
        element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })),
      ),
    );
  }

  async answer(question, options, signal) {
    this.clearDepth();
    this.messages.push({ role: "user", content: question });
    this.say("user", question);
    let body = null;
    let [text, tokens, blocks, first, usage] = ["", 0, 0, 0, null];
    // Screen readers hear the answer once it is whole, not each piece of it.
    this.log.setAttribute("aria-busy", "true");
    const spent = () => {
      const seconds = (performance.now() - first) / 1000;
      const full = tokens * facts.num_blocks;
      this.figures({
        speed: tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : undefined,
        spent: blocks.toLocaleString("en"),
        saved: full ? `${Math.round((100 * blocks) / full)} %` : undefined,
        budget: usage && said(usage.buddy),
      });
    };
    try {
      const asked = {
        model: facts.name,
        messages: this.messages,
        budget: this.budget,
        stream_options: { include_usage: true, include_depth: true },
        ...options,
      };
      for await (const chunk of chunks(asked, key(), signal)) {
        usage = chunk.usage ?? usage;
        text += chunk.choices[0]?.delta.content ?? "";
        body ??= this.say("assistant", "");
        body.textContent = text;
        this.showEnd();
        for (const run of chunk.buddy?.runs ?? []) {
          first ||= performance.now();
          tokens += 1;
          blocks += run.split("1").length - 1;
          this.column(run);
        }
        this.describe(tokens, blocks);
        spent();
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        this.say("error", error.message);
        if (error.status === 401) askForKey();
      }
    } finally {
      this.log.setAttribute("aria-busy", "false");
      this.showEnd(); // what stands below it may have grown
      if (text) this.messages.push({ role: "assistant", content: text });
      else this.messages.pop(); // a question without an answer is not asked again
    }
  }
}

const said = ({ budget_blocks, source }) =>
  `${source === "mean" ? "up to " : ""}${budget_blocks} blocks, ${source}`;

const key = () => sessionStorage.getItem(KEY) ?? "";

function askForKey() {
  $("key-form").hidden = false;
  $("key").focus();
}

function compare(isOn) {
  if (!facts) return;
  if (panes.length === 0) panes.push(new Pane("A", SHARES[0]));
  if (isOn && panes.length === 1) panes.push(new Pane("B", SHARES[1]));
  if (!isOn) panes.length = 1;
  for (const pane of panes) {
    pane.part("legend").textContent = isOn ? `Budget ${pane.name}` : "Budget";
  }
  $("panes").replaceChildren(...panes.map((pane) => pane.root));
  $("panes").classList.toggle("two", isOn);
  showSamples();
}

// Samples are offered until something is said.
function showSamples() {
  $("samples").hidden = !facts || panes.some((pane) => pane.messages.length > 0);
}

function setRunning(controller) {
  running = controller;
  const isOn = controller !== null;
  const held = document.activeElement;
  $("stop").hidden = !isOn;
  $("send").hidden = isOn;
  $("clear").disabled = $("compare").disabled = isOn;
  if (isOn && held === $("send")) $("stop").focus();
  if (!isOn && (held === $("stop") || held === document.body)) $("prompt").focus();
}

async function send() {
  const question = $("prompt").value.trim();
  const inputs = [$("max-tokens"), $("temperature"), ...document.querySelectorAll(".ms")];
  const seen = inputs.filter((one) => one.offsetParent !== null);
  if (!question || running || !facts || !seen.every((one) => one.reportValidity())) return;
  $("prompt").value = "";
  grow();
  const controller = new AbortController();
  setRunning(controller);
  const options = {
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
  };
  $("samples").hidden = true;
  // One after the other: answers made at once would share steps, and their speeds would hardly differ.
  for (const pane of panes.slice(1)) pane.wait(panes[0].name);
  for (const pane of panes) {
    if (controller.signal.aborted) pane.clearDepth();
    else await pane.answer(question, options, controller.signal);
  }
  setRunning(null);
  showSamples();
}

// The field is as high as what is written in it.
function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

const stop = () => running?.abort();

async function connect() {
  try {
    const [model] = (await get("/v1/models", key())).data;
    facts = { ...model.buddy, name: model.id };
  } catch (error) {
    $("state").textContent = error.status === 401 ? "needs a key" : "not reached";
    $("state").dataset.state = "failed";
    if (error.status === 401) askForKey();
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = `${facts.name} · ${facts.num_blocks} blocks`;
  compare($("compare").checked);
  if (!facts.has_chat) panes[0].say("error", "This model has no chat template, so it takes no messages here.");
  await watch();
}

async function watch() {
  let state = "not reached";
  try {
    state = (await (await fetch("/ready")).json()).status;
  } catch {
    // It is not there: that is what is shown.
  }
  $("state").textContent = state;
  $("state").dataset.state = state;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("samples").append(
  ...SAMPLES.map((textContent) => {
    const chip = element("button", { type: "button", className: "chip", textContent });
    chip.addEventListener("click", () => {
      $("prompt").value = textContent;
      send();
    });
    return chip;
  }),
);
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => {
  for (const pane of panes) pane.clear();
  showSamples();
  $("prompt").focus();
});
$("compare").addEventListener("change", (event) => compare(event.target.checked));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  connect();
});
setInterval(() => document.hidden || !facts || watch(), 10_000);
connect();
