// The conversation: its messages, the request for the next answer, and the answer as it grows.

import { Refused, events, request } from "./api.js";
import { render } from "./text.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

export class Chat {
  constructor() {
    this.messages = []; // as the API has them, without the system prompt
    this.running = null; // the AbortController of the answer that is being written
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("prompt").addEventListener("input", grow);
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
  }

  stop() {
    this.running?.abort();
    $("prompt").focus();
  }

  clear() {
    this.stop();
    this.messages = [];
    $("log").replaceChildren();
    $("clear").hidden = true;
    $("prompt").focus();
  }

  body() {
    const body = { messages: [...this.messages], stream: true, stream_options: { include_usage: true } };
    const system = $("system").value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    for (const name of NUMBERS) {
      if ($(name).value !== "") body[name] = Number($(name).value);
    }
    return body;
  }

  async send() {
    const prompt = $("prompt");
    const text = prompt.value.trim();
    if (!text || this.running) return;
    if (!$("composer").checkValidity()) {
      $("sampling").open = true; // the browser points at a field only where it can be seen
      $("composer").reportValidity();
      return;
    }
    const said = { role: "user", content: text };
    this.messages.push(said);
    const question = row("user");
    question.querySelector(".text").textContent = text;
    const answer = new Answer();
    prompt.value = "";
    grow();
    this.busy(new AbortController());
    const { messages, running } = this;
    try {
      const options = { method: "POST", headers: { "content-type": "application/json" }, signal: running.signal };
      const response = await request("v1/chat/completions", { ...options, body: JSON.stringify(this.body()) });
      for await (const event of events(response)) answer.add(event);
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else answer.fail(error instanceof Refused ? error.message : `The connection broke: ${error.message}.`);
    }
    answer.end();
    if (answer.text) {
      messages.push({ role: "assistant", content: answer.text });
    } else {
      messages.splice(messages.indexOf(said), 1); // a question without an answer would confuse the next one
      if (answer.failed && !prompt.value) prompt.value = text;
      grow();
    }
    if (this.running === running) this.busy(null);
  }

  busy(controller) {
    this.running = controller;
    const streaming = controller !== null;
    // A hidden button loses the focus: whoever pressed it with a key goes on typing.
    if ([$("send"), $("stop")].includes(document.activeElement)) $("prompt").focus();
    $("send").hidden = streaming;
    $("stop").hidden = !streaming;
    $("log").ariaBusy = String(streaming); // screen readers then read the whole answer, not every token
    $("clear").hidden = false;
  }
}

/** One answer: text, thoughts, figures. */
class Answer {
  constructor() {
    this.element = row("assistant");
    this.text = "";
    this.thoughts = "";
    this.finish = "";
    this.failed = false;
    this.tokens = 0;
    this.began = performance.now();
    this.first = 0; // when its first token came
    this.drawing = 0;
    this.element.classList.add("growing");
  }

  add(event) {
    if (event.error) throw new Refused(0, event.error.message);
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.first ||= performance.now();
    this.last = performance.now();
    this.text += choice.delta.content ?? "";
    this.thoughts += choice.delta.reasoning_content ?? "";
    this.finish = choice.finish_reason ?? this.finish;
    // Many tokens may come between two frames; a hidden tab has none and is drawn at the end.
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.drawing = 0;
    const log = $("log");
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    if (this.thoughts) {
      const details = this.element.querySelector(".thoughts");
      details.hidden = false;
      details.lastElementChild.textContent = this.thoughts;
    }
    this.element.querySelector(".text").replaceChildren(render(this.text));
    if (following) log.scrollTop = log.scrollHeight;
  }

  fail(message) {
    this.failed = true;
    const note = document.createElement("p");
    note.className = "error";
    note.textContent = message;
    this.element.append(note);
  }

  end() {
    cancelAnimationFrame(this.drawing);
    this.element.classList.remove("growing");
    const figures = [];
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens) figures.push(`${this.tokens} tokens`);
    if (this.tokens > 1 && seconds > 0) figures.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.first) figures.push(`first after ${Math.round(this.first - this.began)} ms`);
    if (this.finish === "length") figures.push("cut at max tokens");
    if (this.finish === "stopped") figures.push("stopped");
    this.element.querySelector(".figures").textContent = figures.join(" · ");
    this.draw();
  }
}

function row(role) {
  const log = $("log");
  log.querySelector(":scope > .empty")?.remove();
  const element = document.createElement("article");
  element.className = role;
  element.ariaLabel = role === "user" ? "You" : "Answer";
  const text = document.createElement("div");
  text.className = "text";
  if (role === "assistant") {
    const thoughts = document.createElement("details");
    thoughts.className = "thoughts";
    thoughts.hidden = true;
    thoughts.append(document.createElement("summary"), document.createElement("div"));
    thoughts.firstElementChild.textContent = "Thoughts";
    const figures = document.createElement("p");
    figures.className = "figures";
    element.append(thoughts, text, figures);
  } else {
    element.append(text);
  }
  log.append(element);
  log.scrollTop = log.scrollHeight;
  return element;
}

/** The field is as high as what is in it, up to what the style sheet allows. */
function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`; // 2: its borders
}
