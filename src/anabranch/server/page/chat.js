// The conversation: its messages, what is asked for with them, and what can be done with each.

import { events, request } from "./api.js";
import { Answer, addActions, button, copy, row } from "./answer.js";
import { chats, download, forgetAll, keep, newChat, title } from "./store.js";
import { render } from "./text.js";

const $ = (id) => document.getElementById(id);
const STARTERS = [
  "Write a haiku about a river that divides.",
  "How does a mixture of experts work? Three sentences.",
  "Compare tea and coffee in a small table.",
]; // for a model that has none of its own
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

export class Chat {
  constructor() {
    this.chat = newChat(); // its messages have what the API takes, without the system prompt, and what is shown with them
    this.editing = null; // the row of the message that the next one replaces
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
    $("schema").addEventListener("input", checkSchema);
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.show(newChat()));
    $("forget").addEventListener("click", () => {
      forgetAll();
      this.chat.forgotten = true;
      this.show(newChat());
    });
    for (const kind of ["md", "json"]) $(`export-${kind}`).addEventListener("click", () => this.export(kind));
    $("cancel-edit").addEventListener("click", () => this.edit(null));
    $("history").addEventListener("toggle", () => this.listPast());
    document.addEventListener("click", ({ target }) => {
      for (const menu of document.querySelectorAll(".menu[open]")) {
        if (!menu.contains(target) || target.localName === "button") menu.open = false;
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      for (const menu of document.querySelectorAll(".menu[open]")) menu.open = false;
      if (this.running) this.stop();
      else if (this.editing) this.edit(null);
    });
    this.show(chats()[0] ?? this.chat);
  }

  /** Of the server and its model, what it says once a second. */
  introduce({ phase, reason, card }) {
    $("stage").hidden = phase !== "loading";
    $("stage").textContent = reason;
    $("starters").hidden = phase !== "ready";
    if ($("starters").childElementCount) return;
    if (card?.about) $("about").replaceChildren(render(card.about));
    $("starters").append(...(card?.prompts ?? STARTERS).map((text) => button(text, () => this.send(text))));
  }

  // -- conversations --------------------------------------------------------------------------------------------------

  show(chat) {
    this.stop();
    this.edit(null);
    this.chat = chat;
    for (const article of $("log").querySelectorAll("article")) article.remove();
    $("intro").hidden = false;
    for (const message of chat.messages) {
      const user = message.role === "user";
      this.offer(message, user ? row("user", message.content) : Answer.of(message).element);
    }
    this.update();
  }

  /** Which of the buttons above the log there is something for. */
  update() {
    const { messages } = this.chat;
    $("history").hidden = !chats().length;
    $("clear").hidden = $("export").hidden = !messages.length && !$("log").querySelector("article");
  }

  listPast() {
    const past = chats().map((chat) => button(title(chat), () => this.show(chat)));
    $("past").replaceChildren(...past);
  }

  export(kind) {
    download(this.body().messages, kind);
  }

  // -- one message ----------------------------------------------------------------------------------------------------

  /** Under a row, what can be done with its message. */
  offer(message, element) {
    element.message = message;
    if (message.role === "user") {
      addActions(element, { Edit: () => this.edit(element) });
    } else {
      const again = () => this.again(element);
      addActions(element, { Copy: (pressed) => copy(message.content, pressed), Regenerate: again });
    }
  }

  edit(element) {
    if (this.editing) $("prompt").value = "";
    this.replaces(element);
    if (element) $("prompt").value = element.message.content;
    grow();
    $("prompt").focus();
  }

  /** The next message takes the place of this row's. */
  replaces(element) {
    this.editing = element;
    $("editing").hidden = !element;
  }

  /** Take away this row and those after it: what is returned can be put back. */
  cut(element) {
    const { messages } = this.chat;
    const at = messages.indexOf(element?.message);
    if (at < 0) return { rows: [], messages: [] }; // no row, or one whose message is no longer there
    const rows = [element];
    while (rows.at(-1).nextElementSibling) rows.push(rows.at(-1).nextElementSibling);
    for (const one of rows) one.remove();
    return { rows, messages: messages.splice(at) };
  }

  again(element) {
    if (this.running || !this.valid()) return;
    this.answer(this.cut(element));
  }

  // -- a request ------------------------------------------------------------------------------------------------------

  stop() {
    this.running?.abort();
    $("prompt").focus();
  }

  body() {
    const messages = this.chat.messages.map(({ role, content }) => ({ role, content }));
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    const system = $("system").value.trim();
    if (system) messages.unshift({ role: "system", content: system });
    for (const name of NUMBERS) {
      if ($(name).value !== "") body[name] = Number($(name).value);
    }
    const schema = $("schema").value.trim();
    if (schema) {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
    }
    return body;
  }

  valid() {
    if ($("composer").checkValidity()) return true;
    $("sampling").open = true; // the browser points at a field only where it can be seen
    $("composer").reportValidity();
    return false;
  }

  async send(text = $("prompt").value.trim()) {
    if (!text || this.running || !this.valid()) return;
    const cut = this.cut(this.editing);
    this.replaces(null);
    const message = { role: "user", content: text };
    this.chat.messages.push(message);
    const question = row("user", text);
    this.offer(message, question);
    $("prompt").value = "";
    grow();
    await this.answer(cut, question);
  }

  /** Ask for the answer to the last message. Where none comes, the conversation is what it was before. */
  async answer(cut, question = null) {
    const { chat } = this;
    const answer = new Answer();
    answer.element.classList.add("growing");
    const running = new AbortController();
    this.busy(running);
    try {
      const options = { method: "POST", headers: { "content-type": "application/json" }, signal: running.signal };
      const response = await request("v1/chat/completions", { ...options, body: JSON.stringify(this.body()) });
      for await (const event of events(response)) answer.add(event);
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else answer.fail(error.message);
    }
    if (!answer.text && !answer.failed) {
      answer.fail(answer.thoughts ? "Only thoughts came, no answer: allow more tokens, or ask again." : "No answer came.");
    }
    answer.end();
    if (answer.text) {
      const { text, thoughts, figures } = answer;
      const message = { role: "assistant", content: text, thoughts, figures };
      chat.messages.push(message);
      this.offer(message, answer.element);
      if (!chat.forgotten) keep(chat);
    } else {
      if (question) chat.messages.pop(); // a question without an answer would confuse the next one
      chat.messages.push(...cut.messages);
      (question ?? answer.element).before(...cut.rows); // nothing where another conversation is shown by now
      if (question) this.takeBack(question, cut.rows[0] ?? null);
      $("log").scrollTop = $("log").scrollHeight;
    }
    if (this.running === running) this.busy(null);
    this.update();
  }

  /** To the field again, unless something else is being written there. */
  takeBack(question, replaced) {
    question.querySelector(".actions").remove();
    if (!question.isConnected || ($("prompt").value && this.editing !== question)) return;
    $("prompt").value ||= question.message.content;
    this.replaces(replaced);
    grow();
  }

  busy(controller) {
    this.running = controller;
    const streaming = controller !== null;
    // A hidden button loses the focus: whoever pressed it with a key goes on typing.
    if ([$("send"), $("stop")].includes(document.activeElement)) $("prompt").focus();
    $("send").hidden = streaming;
    $("stop").hidden = !streaming;
    $("log").ariaBusy = String(streaming); // screen readers then read the whole answer, not every token
    this.update();
  }
}

function checkSchema() {
  const field = $("schema");
  let wrong = "";
  try {
    if (field.value.trim()) JSON.parse(field.value);
  } catch (error) {
    wrong = `This is not JSON: ${error.message}`;
  }
  field.setCustomValidity(wrong);
}

/** The field is as high as what is in it, up to what the style sheet allows. */
function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`; // 2: its borders
}
