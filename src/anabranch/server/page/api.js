// Requests to this server: with the key where one is wanted, and answers that come as a stream of events.

const KEY = "anabranch-key"; // in this tab's own storage
let asking = null;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** No answer, or one that broke off. */
export class Unreachable extends Error {
  constructor(cause) {
    super("The server is unreachable. Is it still running?", { cause });
  }
}

/** What a browser throws is "Failed to fetch" or "network error": neither says what is wrong. A stop is not a fault. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Unreachable(error);
  }
}

/** The response, if it is a good one. A 401 asks the person for the key and tries again; what else goes wrong is thrown. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    // Without a key of our own the browser sends what a proxy in front made it ask the person for, if one did.
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await reached(fetch(path, { ...options, headers, credentials: key ? "omit" : "same-origin" }));
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey(key !== null);
      continue;
    }
    throw new Refused(response.status, await reason(response));
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 200)}`;
  }
}

/** One dialog, however many requests wait for it. */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-key");
    const field = document.getElementById("key");
    if (wrong) document.getElementById("key-note").textContent = "That key was refused. Is it complete?";
    dialog.oncancel = (event) => event.preventDefault(); // nothing works without it
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault(); // form-action 'none' in the policy
      sessionStorage.setItem(KEY, field.value.trim());
      field.value = "";
      dialog.close();
      asking = null;
      resolve();
    };
    dialog.showModal();
    field.focus();
  });
  return asking;
}

/** The JSON of each `data:` event, until [DONE] or the end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reached(reader.read());
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early: the server notices and stops
  }
}
