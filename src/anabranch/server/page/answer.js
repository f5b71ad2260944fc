// What the log shows: a row for each message, and an answer as it grows.

import { Refused } from "./api.js";
import { seconds as time } from "./charts.js";
import { render } from "./text.js";

const $ = (id) => document.getElementById(id);

/** One answer: text, thoughts, figures. */
export class Answer {
  constructor() {
    this.element = row("assistant");
    this.text = "";
    this.thoughts = "";
    this.figures = "";
    this.finish = "";
    this.failed = false;
    this.tokens = 0;
    this.began = performance.now();
    this.first = 0; // when its first token came
    this.drawing = 0;
  }

  /** Of a conversation that was kept. */
  static of({ content, thoughts = "", figures = "" }) {
    const answer = Object.assign(new Answer(), { text: content, thoughts, figures });
    answer.draw();
    return answer;
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
    this.element.querySelector(".figures").textContent = this.figures;
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
    if (this.first) figures.push(`first after ${time((this.first - this.began) / 1000)}`);
    if (this.finish === "length") figures.push("cut at max tokens");
    if (this.finish === "stopped") figures.push("stopped");
    this.figures = figures.join(" · ");
    this.draw();
  }
}

export function row(role, words = "") {
  const log = $("log");
  $("intro").hidden = true;
  const element = document.createElement("article");
  element.className = role;
  element.ariaLabel = role === "user" ? "You" : "Answer";
  const text = document.createElement("div");
  text.className = "text";
  text.textContent = words;
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

/** Buttons under a row: what each is called, and does when it is pressed. */
export function addActions(element, actions) {
  const bar = document.createElement("div");
  bar.className = "actions";
  bar.append(...Object.entries(actions).map(([name, press]) => button(name, press)));
  element.append(bar);
}

export function button(name, press) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "quiet";
  made.textContent = name;
  made.addEventListener("click", () => press(made));
  return made;
}

/** To the clipboard. A page that came without TLS has none but the old way. */
export async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}
