// One question at a time in this page: ask, show the answer as it comes, show where its time went.
//
// What comes from outside (question, answer, sources, errors) only ever becomes text nodes.

import { ConnectionLost, events } from "./sse.js";

const STAGES = ["embedding", "retrieval", "context", "queue", "prefill", "decode"];
const ENDS = {
  length: "Done; cut at the longest answer allowed.",
  abort: "The server ended this answer early.",
};
const HISTORY = "ragserve.history";
const HISTORY_ROWS = 20;

const $ = (id) => document.getElementById(id);

/** What the server refused, or failed at. */
class AnswerError extends Error {
  constructor(message, retryAfter = null) {
    super(message);
    this.retryAfter = retryAfter; // seconds, if the server said so
  }
}

// ---- asking

let running = null; // the AbortController of the answer that is being read
let lastQuestion = "";

async function ask(question) {
  stop();
  const mine = new AbortController();
  running = mine;
  lastQuestion = question;
  const answer = new AnswerView(question);
  showError(null);
  setBusy(true);
  say("Looking for sources …");
  try {
    const body = await post(question, mine.signal);
    const done = await read(body, answer);
    answer.finish(done);
    say(ENDS[done.finish_reason] ?? "Done.");
    remember(question, done);
  } catch (error) {
    if (mine.signal.aborted) remember(question, null);
    if (running !== mine) return; // a newer question has taken the page over
    answer.flush();
    say(mine.signal.aborted ? "Stopped." : "");
    if (!mine.signal.aborted) showError(error);
  } finally {
    if (running === mine) {
      running = null;
      setBusy(false);
    }
  }
}

/** Closes the connection, by which the server knows that nobody waits for the answer. */
function stop() {
  running?.abort();
}

async function post(question, signal) {
  let response;
  try {
    response = await fetch("/ask", {
      method: "POST",
      headers: { "content-type": "application/json", accept: "text/event-stream" },
      body: JSON.stringify({ question }),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new AnswerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response.body;
}

async function refusal(response) {
  const retryAfter = Number.parseFloat(response.headers.get("retry-after") ?? "");
  let detail = "";
  try {
    detail = (await response.json()).error.message;
  } catch {
    // Not our server's JSON: something in between answered. The status says enough.
  }
  const what =
    {
      429: "Too many questions are waiting.",
      503: "The server takes no questions now.",
    }[response.status] ?? `The server refused the question (${response.status}).`;
  return new AnswerError(
    detail ? `${what} ${detail}` : what,
    Number.isFinite(retryAfter) ? retryAfter : null,
  );
}

/** Reads an answer to its end, and returns its last event. */
async function read(body, answer) {
  try {
    for await (const { event, data } of events(body)) {
      const content = JSON.parse(data);
      switch (event) {
        case "retrieval":
          answer.showSources(content.sources);
          say("Reading the sources …");
          break;
        case "delta":
          if (content.text) say("Answering …");
          answer.add(content.text);
          break;
        case "error":
          throw new AnswerError(`The answer failed. ${content.message}`);
        case "done":
          return content;
      }
    }
  } catch (error) {
    if (!(error instanceof ConnectionLost)) throw error;
  }
  throw new AnswerError("The connection ended before the answer was complete.");
}

// ---- showing an answer

/** The answer in the page, and what belongs to it. Making one clears what was there before. */
class AnswerView {
  #pending = ""; // the beginning of what may become a citation
  #numSources = 0;
  #box = $("answer");

  constructor(question) {
    $("result").hidden = false;
    $("asked").textContent = question;
    this.#box.replaceChildren();
    $("sources").replaceChildren();
    $("no-sources").textContent = "None yet.";
    $("no-sources").hidden = false;
    $("measured").hidden = true;
  }

  showSources(sources) {
    this.#numSources = sources.length;
    $("no-sources").textContent = "Nothing was found.";
    $("no-sources").hidden = sources.length > 0;
    $("sources").replaceChildren(
      ...sources.map((source) => {
        const summary = element("summary", `[${source.number}] ${source.title ?? source.id} `);
        summary.append(element("span", `score ${source.score.toFixed(2)}`, "quiet"));
        const details = element("details");
        details.id = `source-${source.number}`;
        details.append(summary, element("pre", source.text ?? ""));
        const item = element("li");
        item.append(details);
        return item;
      }),
    );
  }

  /** Appends text; a citation like [2] becomes a link to its source. */
  add(text) {
    const all = this.#pending + text;
    // "[1" may go on with "]" in the next piece.
    const start = all.search(/\[\d{0,3}$/);
    this.#pending = start < 0 ? "" : all.slice(start);
    this.#append(start < 0 ? all : all.slice(0, start));
  }

  /** Nothing more will come. */
  flush() {
    this.#append(this.#pending);
    this.#pending = "";
  }

  finish(done) {
    this.flush();
    showWaterfall(done.timings);
    $("prompt-tokens").textContent = done.usage.prompt_tokens;
    $("cached-tokens").textContent = done.usage.cached_tokens;
    $("generated-tokens").textContent = done.usage.completion_tokens;
    $("trace").textContent = done.trace_id ?? "not traced";
    $("measured").hidden = false;
  }

  #append(text) {
    // With a group in the pattern, split gives text and number in turn.
    text.split(/\[(\d+)\]/).forEach((part, index) => {
      if (index % 2 === 0) this.#appendText(part);
      else if (part >= 1 && part <= this.#numSources) this.#box.append(citation(part));
      else this.#appendText(`[${part}]`);
    });
  }

  #appendText(text) {
    if (!text) return;
    const last = this.#box.lastChild;
    if (last?.nodeType === Node.TEXT_NODE) last.appendData(text);
    else this.#box.append(text);
  }
}

function citation(number) {
  const link = element("a", `[${number}]`);
  link.href = `#source-${number}`;
  link.setAttribute("aria-label", `Source ${number}`);
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const details = $(`source-${number}`);
    details.open = true;
    details.querySelector("summary").focus();
    details.scrollIntoView({ block: "nearest" });
  });
  return link;
}

/** Draws the stages one after the other, to scale. They cover the whole time without gaps. */
function showWaterfall(timings) {
  const scale = 100 / Math.max(timings.total, 1e-9);
  let start = 0;
  $("stages").replaceChildren(
    ...STAGES.map((stage) => {
      const name = element("th", stage);
      name.scope = "row";
      const bar = element("div", "", `bar ${stage}`);
      bar.style.left = `${start * scale}%`;
      bar.style.width = `${timings[stage] * scale}%`;
      start += timings[stage];
      const track = element("div", "", "track");
      track.append(bar);
      const place = element("td");
      place.append(track);
      const row = element("tr");
      row.append(name, place, element("td", milliseconds(timings[stage]), "number"));
      return row;
    }),
  );
  $("total").textContent = milliseconds(timings.total);
}

// ---- what was answered before

function remember(question, done) {
  const rows = history();
  rows.unshift({ question, ...(done && figures(done)) });
  try {
    sessionStorage.setItem(HISTORY, JSON.stringify(rows.slice(0, HISTORY_ROWS)));
  } catch {
    // No storage, or a full one: the rows stay in the page until it is left.
  }
  showHistory(rows.slice(0, HISTORY_ROWS));
}

function figures({ timings, usage }) {
  const n = usage.completion_tokens;
  return {
    ttft: STAGES.slice(0, -1).reduce((sum, stage) => sum + timings[stage], 0),
    tpot: n > 1 ? timings.decode / (n - 1) : null,
    tokens: n,
  };
}

let shown = [];

function history() {
  try {
    return JSON.parse(sessionStorage.getItem(HISTORY)) ?? shown;
  } catch {
    return shown;
  }
}

function showHistory(rows) {
  shown = rows;
  $("history").hidden = rows.length === 0;
  $("rows").replaceChildren(
    ...rows.map(({ question, ttft, tpot, tokens }) => {
      const row = element("tr");
      row.append(
        element("td", question),
        element("td", ttft === undefined ? "stopped" : milliseconds(ttft), "number"),
        element("td", tpot == null ? "–" : milliseconds(tpot), "number"),
        element("td", tokens ?? "–", "number"),
      );
      return row;
    }),
  );
}

// ---- the rest of the page

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  return made;
}

function milliseconds(seconds) {
  const ms = seconds * 1000;
  return `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
}

function say(text) {
  // A live region is read out for each change, so not for none.
  if ($("status").textContent !== text) $("status").textContent = text;
}

function setBusy(busy) {
  $("stop").disabled = !busy;
  $("answer").setAttribute("aria-busy", String(busy));
}

let countdown = null;

function showError(error) {
  clearInterval(countdown);
  $("error").hidden = error === null;
  if (error === null) return;
  console.error(error);
  $("error-text").textContent = error.message;
  let left = Math.ceil(error.retryAfter ?? 0);
  const show = () => {
    $("retry").textContent = left > 0 ? `Try again (best in ${left} s)` : "Try again";
    if (left-- <= 0) clearInterval(countdown);
  };
  countdown = setInterval(show, 1000);
  show();
}

async function showAbout() {
  try {
    const { model, corpus, examples } = await (await fetch("/about")).json();
    $("about").textContent = `${model} answers from ${corpus}`;
    $("examples").append(
      ...examples.map((question) => {
        const button = element("button", question);
        button.type = "button";
        button.addEventListener("click", () => {
          $("question").value = question;
          ask(question);
        });
        return button;
      }),
    );
    $("examples").hidden = examples.length === 0;
  } catch {
    $("about").textContent = "The server cannot be reached.";
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (question) ask(question);
  else $("question").focus();
});

$("question").addEventListener("keydown", (event) => {
  // While a character is being composed, Enter belongs to the input method.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.isComposing) stop();
});

$("stop").addEventListener("click", () => {
  stop();
  $("question").focus();
});

// A page that is left may be kept for the Back button, with its connection open.
window.addEventListener("pagehide", stop);

$("retry").addEventListener("click", () => ask(lastQuestion));

showHistory(history());
showAbout();
